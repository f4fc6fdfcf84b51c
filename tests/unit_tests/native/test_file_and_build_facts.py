"""What files and the library say of themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from langchain_swarmkv.errors import ModelFormatError, ModelNotFoundError
from langchain_swarmkv.native.build_facts import parse_system_info, read_build_facts
from langchain_swarmkv.native.file_facts import read_file_facts
from langchain_swarmkv.native.worker_process import run_worker
from tests.support.tiny_gguf import ATTENTION_ARCHITECTURES


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "jamba"])
def test_the_facts_of_a_file(tiny_gguf: Callable[..., Path], architecture: str) -> None:
    """Counted in the file by another reader."""
    path = tiny_gguf(architecture, n_layer=4, chat_template=None)
    facts = read_file_facts(path)
    tensors = gguf.GGUFReader(path).tensors
    assert facts.path == path
    assert facts.name == f"tiny-{architecture}"
    assert facts.architecture == architecture
    assert facts.file_bytes == path.stat().st_size
    assert facts.weights_bytes == sum(int(tensor.n_bytes) for tensor in tensors)
    assert facts.num_parameters == sum(int(tensor.n_elements) for tensor in tensors)
    assert facts.file_type_name == "all F32"
    assert (facts.num_layers, facts.n_ctx_train, facts.n_vocab) == (4, 4096, 278)
    assert facts.can_cut == (architecture in ATTENTION_ARCHITECTURES)
    assert not facts.has_chat_template


def test_what_is_no_file_is_refused_without_a_process(tmp_path: Path) -> None:
    """As everywhere else."""
    with pytest.raises(ModelNotFoundError):
        read_file_facts(tmp_path / "missing.gguf")
    with pytest.raises(ModelFormatError, match="not a file"):
        read_file_facts(tmp_path)


def test_a_worker_that_fails_without_a_word_tells_its_exit_code(tmp_path: Path) -> None:
    """A killed one, say."""
    reason = run_worker("load", tmp_path / "missing.gguf")
    assert reason is not None
    assert "missing.gguf" in reason
    assert run_worker("no such task") is not None


def test_the_system_info_is_parsed() -> None:
    """By backend; what is 0 is left out, and other numbers are kept."""
    text = "CUDA : ARCHS = 900 | F16 = 1 | CPU : AVX2 = 1 | AVX512 = 0 | OPENMP = 1 | "
    assert parse_system_info(text) == {"CUDA": ("ARCHS=900", "F16"), "CPU": ("AVX2", "OPENMP")}
    assert parse_system_info("AVX = 1 | FMA = 0 | ") == {"": ("AVX",)}
    assert parse_system_info("") == {}


def test_the_build_has_a_device() -> None:
    """A CPU at least, with its memory."""
    facts = read_build_facts()
    assert "CPU" in [device.name for device in facts.devices]
    assert all(device.description for device in facts.devices)
    assert facts.llama_cpp_python[0].isdigit()
    assert "CPU" in facts.features
