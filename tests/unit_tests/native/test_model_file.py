"""Files that cannot write, or over which llama.cpp would end the process: refused before it."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGUFWriter

from langchain_swarmkv.errors import ModelError, ModelFormatError, UnsupportedModelError
from langchain_swarmkv.native.file_facts import read_file_facts
from langchain_swarmkv.native.model import ModelHandle
from langchain_swarmkv.native.model_file import check_model
from tests.support.vocabularies import BYTE_LEVEL
from tests.unit_tests.native.isolated import outcomes

EPSILON = "llama.attention.layer_norm_rms_epsilon"


def patched(source: Path, target: Path, key: str, layout: str, value: float) -> Path:
    """A copy of a GGUF with another number behind a key."""
    data = bytearray(source.read_bytes())
    place = data.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key) + 4
    struct.pack_into(layout, data, place, value)
    target.write_bytes(data)
    return target


def header_only(path: Path, architecture: str, **numbers: int) -> Path:
    """A GGUF without tensors."""
    writer = GGUFWriter(path, architecture)
    writer.add_token_list(["a", "b"])
    for key, value in numbers.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture
def bad_files(tiny_llama: Path, tiny_gguf: Callable[..., Path], tmp_path: Path) -> dict[str, Path]:
    """llama.cpp ends the process over each of these: at the load, or at the first token."""
    tokens = list(BYTE_LEVEL.tokens)
    tokens[66] = tokens[65]
    files = {
        f"epsilon {value}": patched(tiny_llama, tmp_path / f"{i}.gguf", EPSILON, "<f", value)
        for i, value in enumerate((-1e-6, float("nan")))
    }
    files["no layers"] = patched(tiny_llama, tmp_path / "none.gguf", "llama.block_count", "<I", 0)
    files["token twice"] = tiny_gguf(
        "llama", vocabulary=dataclasses.replace(BYTE_LEVEL, tokens=tuple(tokens))
    )
    return files


def test_what_llama_cpp_asserts_on_is_refused_before(bad_files: dict[str, Path]) -> None:
    """By the vocabulary alone, too, and by the engine; the process goes on and loads a good one."""
    code = """
    import sys
    for path in sys.argv[1:]:
        attempt(f"{path} vocabulary", lambda: LlamaTokenizer(Path(path)))
        attempt(f"{path} engine", lambda: append(open_engine(path), 0, [65]))
    """
    seen = outcomes(code, *bad_files.values())
    assert seen == dict.fromkeys(seen, "ModelFormatError")
    assert len(seen) == 2 * len(bad_files)


def test_the_reasons_are_told(bad_files: dict[str, Path], tiny_llama: Path) -> None:
    """With what the file says."""
    for name, words in {
        "epsilon -1e-06": "epsilon=-1e-06",
        "epsilon nan": "epsilon=nan",
        "no layers": "block_count=0",
        "token twice": "twice in its vocabulary",
    }.items():
        with pytest.raises(ModelFormatError, match=words):
            check_model(bad_files[name])
    check_model(tiny_llama)


def test_numbers_that_do_not_go_together(tmp_path: Path) -> None:
    """As far as llama.cpp asserts on them at the load."""
    for number, (numbers, words) in enumerate(
        (
            ({"block_count": 600}, "block_count=600"),
            ({"expert_count": 2000}, "expert_count=2000"),
            ({"expert_count": 4, "expert_used_count": 5}, "expert_used_count=5"),
            ({"expert_count": 4, "expert_used_count": 0}, "expert_used_count=0"),
            ({"expert_used_count": 1}, "expert_used_count=1"),
        )
    ):
        path = header_only(tmp_path / f"{number}.gguf", "qwen3moe", **numbers)
        with pytest.raises(ModelFormatError, match=words):
            check_model(path)
    check_model(
        header_only(tmp_path / "good.gguf", "qwen3moe", expert_count=4, expert_used_count=2)
    )


@pytest.mark.parametrize(
    ("architecture", "numbers", "kind"),
    [
        ("bert", {}, "an embedding model"),
        ("nomic-bert", {"pooling_type": 1}, "an embedding model"),
        ("qwen3", {"pooling_type": 3}, "an embedding model"),
        ("qwen3", {"pooling_type": 4}, "a reranking model"),
    ],
)
def test_a_model_that_embeds_is_refused_by_its_name(
    tmp_path: Path, architecture: str, numbers: dict[str, int], kind: str
) -> None:
    """By its architecture, or by how it pools; also for its vocabulary, and for the doctor."""
    path = header_only(tmp_path / "embeds.gguf", architecture, **numbers)
    for use in (
        check_model,
        read_file_facts,
        lambda path: ModelHandle(path, vocab_only=True),
    ):
        with pytest.raises(UnsupportedModelError, match=f"is {kind}, it cannot write"):
            use(path)
    check_model(header_only(tmp_path / "writes.gguf", "qwen3", pooling_type=0))


def test_what_only_the_first_token_shows_is_found_in_another_process(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor names it: llama.cpp loads the file, and ends that process at the first token."""
    path = patched(tiny_llama, tmp_path / "bad.gguf", EPSILON, "<f", -1e-6)
    for module in ("file_facts", "model"):
        # As if nobody knew that this value is bad.
        monkeypatch.setattr(f"langchain_swarmkv.native.{module}.check_model", lambda path: None)
    with pytest.raises(ModelFormatError, match=r"decode with it: .*eps"):
        read_file_facts(path)


def test_a_damaged_header_is_left_to_llama_cpp(tiny_llama: Path, tmp_path: Path) -> None:
    """Cut off anywhere: an error of the load, and no other."""
    data = tiny_llama.read_bytes()
    for length in (30, 100, 1000, 5000):
        path = tmp_path / f"{length}.gguf"
        path.write_bytes(data[:length])
        check_model(path)
        with pytest.raises(ModelError):
            ModelHandle(path, vocab_only=False)
