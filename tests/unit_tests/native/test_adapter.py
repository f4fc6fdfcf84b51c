"""Adapter files: what is wrong with one is said, and none of them ends the process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from langchain_swarmkv.errors import (
    ModelError,
    ModelFormatError,
    ModelLoadError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from langchain_swarmkv.native.adapter import load_adapter
from langchain_swarmkv.native.library import library
from langchain_swarmkv.native.model import ModelHandle
from tests.support.tiny_gguf import ARCHITECTURES, N_EMBD, TinyLora, write_lora_gguf
from tests.support.vocabularies import BYTE_LEVEL
from tests.unit_tests.native.isolated import outcomes

TinyGguf = Callable[..., Path]
Tensors = dict[str, np.ndarray]

MATRIX = "blk.0.attn_q.weight"
RANK = 4


def pair(
    name: str = MATRIX,
    a: tuple[int, ...] = (RANK, N_EMBD),
    b: tuple[int, ...] = (N_EMBD, RANK),
    kind: Any = np.float32,
) -> Tensors:
    return {f"{name}.lora_a": np.zeros(a, kind), f"{name}.lora_b": np.zeros(b, np.float32)}


A_ALONE, B_ALONE = ({name: tensor} for name, tensor in pair().items())
STACK_A, STACK_B = (2, RANK, N_EMBD), (2, N_EMBD, RANK)

HOSTILE: dict[str, tuple[dict[str, Any], type[ModelError], str]] = {
    "a model": ({"general_type": "model"}, ModelFormatError, "is no LoRA adapter: it is a model."),
    "no type": ({"general_type": None}, ModelFormatError, "None, not 'adapter'"),
    "a type that is a number": ({"general_type": 3}, ModelFormatError, "not 'adapter'"),
    "a control vector": ({"adapter_type": "cvec"}, ModelFormatError, "'cvec', not 'lora'"),
    "an adapter type that is a list": ({"adapter_type": [1]}, ModelFormatError, "not 'lora'"),
    "a whole alpha": ({"alpha": 8}, ModelFormatError, "alpha"),
    "an alpha that is text": ({"alpha": "8"}, ModelFormatError, "alpha"),
    "of another architecture": ({"architecture": "qwen2"}, UnsupportedModelError, "'qwen2'"),
    "of no known architecture": ({"architecture": "llama7"}, UnsupportedModelError, "'llama7'"),
    "active behind tokens": (
        {"more": {"adapter.alora.invocation_tokens": [1, 2]}},
        UnsupportedModelError,
        "aLoRA",
    ),
    "a zero byte in a text": ({"more": {"general.name": "a\0b"}}, ModelFormatError, "zero byte"),
    "no tensors": ({"tensors": {}}, ModelFormatError, "no tensors"),
    "a norm alone": (
        {"tensors": {"blk.0.attn_norm.weight": np.zeros(N_EMBD, np.float32)}},
        ModelFormatError,
        "no tensors",
    ),
    "a tensor of a model": (
        {"tensors": {MATRIX: np.zeros((N_EMBD, N_EMBD), np.float32)}},
        ModelFormatError,
        "none of a pair",
    ),
    "no b": ({"tensors": A_ALONE}, ModelFormatError, "lacks"),
    "no a": ({"tensors": B_ALONE}, ModelFormatError, "lacks"),
    "a zero byte in a name": (
        {"tensors": pair("token_embd.weight.lora_a\0")},
        ModelFormatError,
        "zero byte",
    ),
    "ranks that differ": ({"tensors": pair(b=(N_EMBD, 5))}, ModelFormatError, "no pair"),
    "no rank": ({"tensors": pair(a=(0, N_EMBD), b=(N_EMBD, 0))}, ModelFormatError, "shape"),
    "a stack": ({"tensors": pair(a=STACK_A, b=STACK_B)}, ModelFormatError, "no pair"),
    "a stack for one": ({"tensors": pair(a=STACK_A)}, ModelFormatError, "no pair"),
    "four dimensions": ({"tensors": pair(a=(2, 1, RANK, N_EMBD))}, ModelFormatError, "no pair"),
    "experts": (
        {"tensors": pair("blk.0.ffn_up_exps.weight", a=STACK_A, b=STACK_B)},
        ModelFormatError,
        "no pair",
    ),
    **{
        f"of type {kind.__name__}": ({"tensors": pair(kind=kind)}, ModelFormatError, "type")
        for kind in (np.int8, np.int32, np.float64)
    },
    "embeddings": (
        {"tensors": pair("token_embd.weight", a=(len(BYTE_LEVEL), RANK))},
        UnsupportedModelError,
        "embeddings",
    ),
    "embeddings by another name": (
        {"tensors": pair("token_embd.lora_a.weight", a=(len(BYTE_LEVEL), RANK))},
        ModelError,
        "",
    ),
    "another width": ({"tensors": pair(a=(RANK, 64))}, ModelLoadError, "incorrect shape"),
    "another height": ({"tensors": pair(b=(64, RANK))}, ModelLoadError, "incorrect shape"),
    "of no such matrix": (
        {"tensors": pair("blk.7.attn_q.weight")},
        ModelLoadError,
        "does not exist",
    ),
}


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> ModelHandle:
    return ModelHandle(tiny_llama, vocab_only=False)


def write_hostile(path: Path, options: dict[str, Any]) -> Path:
    return write_lora_gguf(path, **{"tensors": pair(), **options})


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_wrong_with_a_file_is_said(name: str, model: ModelHandle, tmp_path: Path) -> None:
    """With its path; and the model has no part of it."""
    options, kind, reason = HOSTILE[name]
    path = write_hostile(tmp_path / "adapter.gguf", options)
    with pytest.raises(kind, match=r"adapter\.gguf") as refused:
        load_adapter(model, path, 1.0)
    assert reason in str(refused.value)
    assert refused.value.facts["path"] == path
    assert model.adapters == []


def test_a_file_that_is_not_there_is_said_to_be_missing(model: ModelHandle, tmp_path: Path) -> None:
    """Not that a model is."""
    with pytest.raises(ModelNotFoundError, match=r"There is no file .*missing\.gguf"):
        load_adapter(model, tmp_path / "missing.gguf", 1.0)


def test_other_weights_than_llama_cpp_can_adapt_are_refused(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVFP4: there is an assert against it."""
    nvfp4 = library().LLAMA_FTYPE_MOSTLY_NVFP4
    monkeypatch.setattr(ModelHandle, "file_type", property(lambda _: nvfp4))
    with pytest.raises(UnsupportedModelError, match="NVFP4"):
        load_adapter(
            ModelHandle(tiny_llama, vocab_only=False), TinyLora().write(tmp_path / "a.gguf"), 1.0
        )


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_a_converted_file_is_taken(kind: Any, tiny_llama: Path, tmp_path: Path) -> None:
    """With norms, which llama.cpp passes over, lists and texts, and without an alpha."""
    tensors = {**pair(kind=kind), "blk.0.attn_norm.weight": np.ones(N_EMBD, np.float32)}
    more = {"general.tags": ["a", "b"], "general.sizes": [1, 2], "general.name": "é"}
    path = write_lora_gguf(tmp_path / "adapter.gguf", tensors, alpha=None, more=more)
    model = ModelHandle(tiny_llama, vocab_only=False)
    load_adapter(model, path, 0.5)
    ((pointer, scale),) = model.adapters
    assert pointer
    assert scale == 0.5


def test_no_file_ends_the_process(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    """The same files, cut ones, damaged ones and models; each decodes if it loads."""
    whole = TinyLora(rank=1).write(tmp_path / "good").read_bytes()
    contents = {
        "empty": b"",
        "header alone": whole[:24],
        "text": b"GGUF is not enough " * 100,
        **{f"cut at {k} of 64": whole[: len(whole) * k // 64] for k in range(1, 64)},
        **{f"cut in the header at {k}": whole[:k] for k in range(30, 900, 29)},
        "cut by one byte": whole[:-1],
    }
    damaged = {
        f"byte {position} set to {value}": whole[:position] + bytes([value]) + whole[position + 1 :]
        for position in range(8, 1000)
        for value in (0xFF, whole[position] ^ 0x80)
    }
    for name, content in {**contents, **damaged}.items():
        (tmp_path / name).write_bytes(content)
    for name, (options, _, _) in HOSTILE.items():
        write_hostile(tmp_path / name, options)
    (tmp_path / "a folder").mkdir()
    models = [tiny_gguf(architecture) for architecture in ARCHITECTURES]
    code = """
    import sys
    from langchain_swarmkv.config import LoraAdapter
    from langchain_swarmkv.native.adapter import load_adapter
    from langchain_swarmkv.native.context import ContextHandle
    from langchain_swarmkv.engine.llama import _context_settings

    folder, model_path, *others = map(Path, sys.argv[1:])
    config = EngineConfig(model_path=model_path, n_ctx=256, n_batch=32, max_sequences=4,
                          n_threads=1)
    from langchain_swarmkv.native.model import ModelHandle

    model = ModelHandle(model_path, vocab_only=False)

    def decode(path):
        model.adapters.clear()  # llama.cpp frees them with the model
        load_adapter(model, path, 1.0)
        context = ContextHandle(model, _context_settings(config))
        context.decode([65, 66, 67], [0, 1, 2], [0, 0, 0], [2])
        context.close()
        return "decodes"

    for path in [*sorted(folder.iterdir()), *others, folder / "missing"]:
        attempt(path.name, lambda: decode(path))
    adapters = [LoraAdapter(path=folder / "no b")]
    attempt("an engine", lambda: open_engine(model_path, adapters=adapters))
    attempt("the good one again", lambda: decode(folder / "good"))
    """
    seen = outcomes(code, tmp_path, *models)
    assert len(seen) == 1 + len(contents) + len(damaged) + len(HOSTILE) + 1 + (len(models) - 1) + 3
    assert seen["good"] == seen["the good one again"] == "decodes"
    assert seen["missing"] == "ModelNotFoundError"
    assert seen["an engine"] == "ModelFormatError"
    refused = [*contents, *HOSTILE, "a folder", *(path.name for path in models[1:])]
    assert {seen[name] for name in refused} <= {
        kind.__name__ for kind in (ModelFormatError, ModelLoadError, UnsupportedModelError)
    }
    assert {seen[name] for name in contents} <= {"ModelFormatError", "ModelLoadError"}
    assert ModelNotFoundError.__name__ not in {seen[name] for name in damaged}
