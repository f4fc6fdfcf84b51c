"""What a GGUF file says of itself once llama.cpp has loaded all of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from langchain_swarmkv.errors import ModelFormatError, UnsupportedModelError
from langchain_swarmkv.native.model import ModelHandle
from langchain_swarmkv.native.model_file import check_model
from langchain_swarmkv.native.weight_types import file_type_name
from langchain_swarmkv.native.worker_process import run_worker

__all__ = ["FileFacts", "read_file_facts"]


@dataclass(frozen=True)
class FileFacts:
    """A model file that loads."""

    path: Path
    name: str
    architecture: str
    file_bytes: int
    """Of the file, or of all tensors if its other parts are files of their own."""
    weights_bytes: int
    file_type: int
    """How most weights are stored, of `enum llama_ftype`."""
    file_type_name: str
    num_parameters: int
    num_layers: int
    n_ctx_train: int
    n_vocab: int
    can_cut: bool
    """Whether its sequences can be forked at any length."""
    has_chat_template: bool


def read_file_facts(path: Path) -> FileFacts:
    """Load the model, its weights too, and look.

    Another process loads it first, and decodes a few tokens: for some damaged files llama.cpp ends
    the process, at the load or at the first token.

    Raises:
        ModelError: the file is missing, no GGUF, damaged, or no model that generates text.
    """
    check_model(path)
    reason = run_worker("load", path)
    if reason is not None:
        raise ModelFormatError(
            f"llama.cpp could not load {path} and decode with it: {reason}.", path=path
        )
    model = ModelHandle(path, vocab_only=False)
    try:
        if not model.is_decoder:
            raise UnsupportedModelError(
                f"{path} is not a decoder-only model; it cannot continue a prompt.", path=path
            )
        return FileFacts(
            path=path,
            name=model.metadata("general.name") or path.stem,
            architecture=model.metadata("general.architecture") or "unknown",
            file_bytes=max(path.stat().st_size, model.weights_bytes),
            weights_bytes=model.weights_bytes,
            file_type=model.file_type,
            file_type_name=file_type_name(model.file_type),
            num_parameters=model.num_parameters,
            num_layers=model.num_layers,
            n_ctx_train=model.n_ctx_train,
            n_vocab=model.n_vocab,
            can_cut=model.can_cut,
            has_chat_template=model.chat_template is not None,
        )
    finally:
        model.close()
