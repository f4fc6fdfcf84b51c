"""Repacking: what comes out, what is refused, and that nothing half-written stays behind."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest

from langchain_swarmkv.config import EngineConfig, SamplingParams
from langchain_swarmkv.engine.contract import Batch
from langchain_swarmkv.engine.llama import LlamaEngine
from langchain_swarmkv.errors import ConfigurationError, ModelFormatError
from langchain_swarmkv.native import quantize as quantize_module
from langchain_swarmkv.native.file_facts import FileFacts, read_file_facts
from langchain_swarmkv.native.quantize import estimated_bytes, quantize
from langchain_swarmkv.native.weight_types import WEIGHT_TYPES
from tests.unit_tests.native.isolated import outcomes

TinyGguf = Callable[..., Path]
Q8_0, Q4_0, F16 = WEIGHT_TYPES["q8_0"], WEIGHT_TYPES["q4_0"], WEIGHT_TYPES["f16"]


@pytest.fixture(scope="module")
def source(tiny_llama: Path) -> FileFacts:
    """A tiny model of F32 weights."""
    return read_file_facts(tiny_llama)


def greedy(path: Path, num_tokens: int) -> list[int]:
    engine = LlamaEngine(
        EngineConfig(model_path=path, n_ctx=256, n_batch=64, max_sequences=2, n_threads=1)
    )
    sampler = engine.create_sampler(SamplingParams(), [])
    tokens = list(range(40, 80))
    batch = Batch()
    row = batch.add(0, tokens, 0, want_logits=True)
    for position in range(len(tokens), len(tokens) + num_tokens):
        engine.decode(batch)
        tokens.append(sampler.sample(row))
        batch = Batch()
        row = batch.add(0, tokens[-1:], position, want_logits=True)
    sampler.close()
    engine.close()
    return tokens[-num_tokens:]


def test_the_result_is_the_same_model_in_another_type(source: FileFacts, tmp_path: Path) -> None:
    """Metadata and shapes are kept, the type is the one asked for, and the file is smaller."""
    target = tmp_path / "out.gguf"
    written = quantize(source, target, WEIGHT_TYPES["q4_k_m"], n_threads=1)
    assert written == read_file_facts(target)
    assert written.file_type == WEIGHT_TYPES["q4_k_m"].file_type
    assert written.file_bytes == target.stat().st_size < 0.6 * source.file_bytes
    before, after = gguf.GGUFReader(source.path), gguf.GGUFReader(target)
    added = {"general.file_type", "general.quantization_version", "GGUF.kv_count"}
    assert set(after.fields) - set(before.fields) <= added
    for key in set(before.fields) - {"GGUF.kv_count"}:
        assert before.fields[key].contents() == after.fields[key].contents(), key
    shapes = {tensor.name: tensor.shape.tolist() for tensor in before.tensors}
    assert {tensor.name: tensor.shape.tolist() for tensor in after.tensors} == shapes
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


def test_f16_weights_are_the_rounded_ones(source: FileFacts, tmp_path: Path) -> None:
    """Matrices become their nearest F16 values; vectors stay as they are."""
    target = tmp_path / "f16.gguf"
    quantize(source, target, F16, n_threads=1)
    before = {tensor.name: tensor.data for tensor in gguf.GGUFReader(source.path).tensors}
    for tensor in gguf.GGUFReader(target).tensors:
        expected = before[tensor.name]
        is_matrix = len(tensor.shape) > 1
        assert np.array_equal(
            tensor.data, expected.astype(np.float16) if is_matrix else expected
        ), tensor.name
    assert greedy(target, 12) == greedy(source.path, 12)


@pytest.mark.parametrize("architecture", ["gemma3", "jamba"])
def test_other_architectures_are_repacked(
    tiny_gguf: TinyGguf, tmp_path: Path, architecture: str
) -> None:
    """Q8_0 rounds so little that the tiny models begin their answers as before."""
    source = read_file_facts(tiny_gguf(architecture))
    target = tmp_path / "out.gguf"
    quantize(source, target, Q8_0, n_threads=1)
    assert greedy(target, 1) == greedy(source.path, 1)


def test_a_quantised_file_is_repacked_again(source: FileFacts, tmp_path: Path) -> None:
    """llama.cpp refuses that unless told; the command says what it costs."""
    first = quantize(source, tmp_path / "q8_0.gguf", Q8_0, n_threads=1)
    second = quantize(first, tmp_path / "q4_0.gguf", Q4_0, n_threads=1)
    assert second.file_type_name == "Q4_0"
    assert second.file_bytes < first.file_bytes


def test_progress_counts_all_tensors(source: FileFacts, tmp_path: Path) -> None:
    """From the first to the last, each once."""
    seen: list[tuple[int, int]] = []
    quantize(
        source,
        tmp_path / "out.gguf",
        Q8_0,
        n_threads=1,
        on_progress=lambda begun, total: seen.append((begun, total)),
    )
    num_tensors = len(gguf.GGUFReader(source.path).tensors)
    assert seen == [(begun, num_tensors) for begun in range(1, num_tensors + 1)]


def test_an_interrupt_leaves_what_was_there(source: FileFacts, tmp_path: Path) -> None:
    """The older file under the name, and nothing else."""
    target = tmp_path / "out.gguf"
    target.write_bytes(b"older")

    def interrupt(begun: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(source, target, Q8_0, n_threads=1, on_progress=interrupt)
    assert target.read_bytes() == b"older"
    assert list(tmp_path.iterdir()) == [target]


def test_a_file_that_would_not_fit_the_disk_is_not_begun(
    source: FileFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has both numbers."""
    needed = estimated_bytes(source, Q8_0)
    for free in (needed - 1, needed):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        if free < needed:
            with pytest.raises(ConfigurationError, match=r"no room in .* MB are free"):
                quantize(source, tmp_path / "out.gguf", Q8_0, n_threads=1)
            assert list(tmp_path.iterdir()) == []
        else:
            quantize(source, tmp_path / "out.gguf", Q8_0, n_threads=1)


def test_a_disk_that_fills_up_on_the_way_leaves_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    """A write that fails is an error, wherever it falls: also in the last bytes."""
    code = """
    import os, resource, sys
    from langchain_swarmkv.native.file_facts import read_file_facts
    from langchain_swarmkv.native.quantize import quantize
    from langchain_swarmkv.native.weight_types import WEIGHT_TYPES

    source, folder = read_file_facts(Path(sys.argv[1])), Path(sys.argv[2])
    full = quantize(source, folder / "whole.gguf", WEIGHT_TYPES["q8_0"], n_threads=1).file_bytes
    for limit in (4096, full // 2, full - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        attempt(f"limit of {limit}",
                lambda: quantize(source, folder / "cut.gguf", WEIGHT_TYPES["q8_0"], n_threads=1))
    print("left:", sorted(path.name for path in folder.iterdir()))
    """
    seen = outcomes(code, tiny_llama, tmp_path)
    assert seen.pop("left") == "['whole.gguf']"
    assert list(seen.values()) == ["ConfigurationError"] * 3


def test_damaged_files_end_in_a_typed_error(tiny_llama: Path, tmp_path: Path) -> None:
    """Some of these make llama.cpp abort, when it loads or when it converts them."""
    whole = tiny_llama.read_bytes()
    data_start = gguf.GGUFReader(tiny_llama).data_offset
    twice = b"\x01" + bytes(7) + b"Q", b"\x01" + bytes(7) + b"R"
    assert whole.count(twice[0]) == 1
    contents = {
        "vocabulary with a token twice": whole.replace(*twice),
        "weights that are not numbers": whole[:data_start]
        + np.full((len(whole) - data_start) // 4, np.nan, "<f4").tobytes(),
        "cut": whole[: len(whole) // 2],
        "header": whole[:24],
        "empty": b"",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    code = """
    import sys
    from langchain_swarmkv.native.file_facts import read_file_facts
    from langchain_swarmkv.native.quantize import quantize
    from langchain_swarmkv.native.weight_types import WEIGHT_TYPES

    def convert(path):
        quantize(read_file_facts(path), path.with_suffix(".out"), WEIGHT_TYPES["q8_0"], n_threads=1)

    for name in [*sys.argv[2:], "missing"]:
        attempt(name, lambda: convert(Path(sys.argv[1]) / name))
    """
    seen = outcomes(code, tmp_path, *contents)
    assert seen.pop("missing") == "ModelNotFoundError"
    assert seen == dict.fromkeys(contents, "ModelFormatError")
    assert {path.name for path in tmp_path.iterdir()} == set(contents)


def test_llama_cpp_s_reason_is_told_in_one_line(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the file, and without the folders in which llama.cpp was built."""
    # As if nobody knew that llama.cpp ends the process over this file.
    monkeypatch.setattr("langchain_swarmkv.native.file_facts.check_model", lambda path: None)
    path = tmp_path / "twice.gguf"
    whole = tiny_llama.read_bytes()
    path.write_bytes(whole.replace(b"\x01" + bytes(7) + b"Q", b"\x01" + bytes(7) + b"R"))
    with pytest.raises(
        ModelFormatError, match=r"twice\.gguf .*: llama-vocab\.cpp:\d+: .*failed"
    ) as e:
        read_file_facts(path)
    assert "\n" not in str(e.value)


def test_another_model_in_the_result_is_noticed(
    source: FileFacts, tiny_gguf: TinyGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written is loaded and compared before it gets its name."""
    other = tiny_gguf("llama", n_layer=3)

    def write_other(task: str, source: Path, target: Path, *_: object, **__: object) -> None:
        shutil.copy(other, target)

    monkeypatch.setattr(quantize_module, "run_worker", write_other)
    with pytest.raises(ModelFormatError, match="to another model"):
        quantize(source, tmp_path / "out.gguf", Q8_0, n_threads=1)
    assert list(tmp_path.iterdir()) == []
