"""From settings to an engine or a tokenizer, so that higher floors name no concrete class."""

from __future__ import annotations

from pathlib import Path

from langchain_swarmkv.config import EngineConfig
from langchain_swarmkv.engine.contract import Engine, Tokenizer

__all__ = ["open_engine", "open_tokenizer"]


def open_engine(config: EngineConfig) -> Engine:
    """Load a model and make its context.

    Raises:
        ModelError: the model cannot be used.
    """
    from langchain_swarmkv.engine.llama import LlamaEngine

    return LlamaEngine(config)


def open_tokenizer(model_path: Path) -> Tokenizer:
    """Load a model's vocabulary alone.

    Raises:
        ModelError: the file cannot be used.
    """
    from langchain_swarmkv.engine.llama_tokenizer import LlamaTokenizer

    return LlamaTokenizer(model_path)
