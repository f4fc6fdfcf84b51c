"""A diagnosis holds what was found, warns of what spoils it, and leaves nothing behind."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from langchain_swarmkv.config import EngineConfig
from langchain_swarmkv.doctor import diagnosis as diagnosis_module
from langchain_swarmkv.doctor.diagnosis import Diagnosis, diagnose
from langchain_swarmkv.errors import ConfigurationError


@pytest.fixture(autouse=True)
def short_documents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """64 tokens, and a folder for temporary files that can be looked into."""
    monkeypatch.setattr(diagnosis_module, "_DOCUMENT_TOKENS", 64)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def examine(path: Path, *, compare_types: bool = False, n_ctx: int = 4096) -> Diagnosis:
    return diagnose(
        EngineConfig(model_path=path, n_ctx=n_ctx, n_threads=1),
        task_tokens=44,
        max_tokens=256,
        compare_types=compare_types,
    )


def test_all_is_found_out(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Facts, capacity, and rates of the file and of a copy, which is gone afterwards."""
    monkeypatch.setattr(diagnosis_module, "_COMPARED_TYPES", ("q4_0",))
    found = examine(tiny_llama, compare_types=True)
    assert found.model.name == "tiny-llama"
    assert found.pool.pool_bytes == 4096 * found.pool.kv_bytes_per_token
    assert [(c.document_tokens, c.num_branches) for c in found.pool.capacities] == [(1000, 10)]
    assert [row.weight_type for row in found.rates] == [None, "q4_0"]
    for row in found.rates:
        assert row.flash is not None
        assert row.plain.document_tokens == row.flash.document_tokens == 64
    assert found.rates[1].file_bytes < found.rates[0].file_bytes == found.model.file_bytes
    assert found.advice.n_threads == 1
    assert found.machine.usable_cores >= 1
    assert list(tmp_path.iterdir()) == []


def test_states_that_do_not_grow(tiny_gguf: Callable[..., Path]) -> None:
    """A recurrent model has no KV bytes a token."""
    assert examine(tiny_gguf("mamba")).pool.kv_bytes_per_token == 0


def test_large_files_are_not_converted(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning says why there is no comparison."""
    monkeypatch.setattr(diagnosis_module, "_MAX_CONVERTED_BYTES", 1000)
    found = examine(tiny_llama, compare_types=True)
    assert len(found.rates) == 1
    assert any("larger than" in warning for warning in found.warnings)


def test_a_copy_that_cannot_be_made_does_not_spoil_the_rest(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No room for temporary files, say."""

    def fail(*_: object, **__: object) -> None:
        raise ConfigurationError("no room in '/tmp'.")

    monkeypatch.setattr(diagnosis_module, "quantize", fail)
    found = examine(tiny_llama, compare_types=True)
    assert len(found.rates) == 1
    assert sum("was not measured: no room" in warning for warning in found.warnings) == 2


def test_other_work_on_the_machine_is_warned_of(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, by the load average; meanwhile, by the time that this process did not get."""

    def warnings() -> str:
        return " ".join(examine(tiny_llama).warnings)

    monkeypatch.setattr(diagnosis_module.os, "getloadavg", lambda: (0.0, 9.0, 9.0))
    monkeypatch.setattr(diagnosis_module.time, "process_time", diagnosis_module.time.perf_counter)
    assert warnings() == ""
    monkeypatch.setattr(diagnosis_module.os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    monkeypatch.setattr(diagnosis_module.time, "process_time", lambda: 0.0)
    noisy = warnings()
    assert "load average was 99.0" in noisy
    assert "got only 0% of the time of 1 core:" in noisy
