"""How many tokens llama.cpp is given, at the one place where batches go to `llama_decode`."""

from __future__ import annotations

from typing import Any

import pytest

from langchain_swarmkv.native.context import ContextHandle


class DecodeSpy:
    """Counts the tokens of every batch."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def reset(self) -> None:
        self.num_tokens = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On `ContextHandle.decode`."""
        decode = ContextHandle.decode

        def counting(context: ContextHandle, tokens: list[int], *rest: Any) -> None:
            decode(context, tokens, *rest)
            self.num_tokens += len(tokens)

        monkeypatch.setattr(ContextHandle, "decode", counting)
