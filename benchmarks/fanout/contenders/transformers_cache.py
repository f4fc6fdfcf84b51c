"""PyTorch: `transformers` with the same file, its weights dequantised, and copies of one cache."""

from __future__ import annotations

import copy
import importlib.util
import time
from collections.abc import Sequence
from typing import Any

from ..case import Case
from ..contender import Contender, Outcome, Settings

__all__ = ["TransformersCache"]

_REQUIRED = ("torch", "transformers", "gguf", "accelerate")
_WAVE = 16
_WARM_TOKENS = 64


class TransformersCache(Contender):
    """A `DynamicCache` is filled with the document, copied for each branch, and decoded in waves.

    Document after document. In a cold case there is nothing to copy, and every branch computes its
    whole prompt.
    """

    name = "transformers"

    @classmethod
    def candidates(cls, case: Case) -> list[Settings]:
        """A batch of branches, or one after the other."""
        most = min(max(len(document.prompts) for document in case.documents), _WAVE)
        return [{"dtype": "float32", "wave": wave} for wave in sorted({most, 1}, reverse=True)]

    @classmethod
    def unavailable(cls) -> str | None:
        """PyTorch is large: an extra of its own."""
        missing = [name for name in _REQUIRED if importlib.util.find_spec(name) is None]
        if missing:
            return f"{', '.join(missing)} missing: pip install 'langchain-swarmkv[bench-torch]'"
        return None

    def open(self) -> None:
        """Load, and answer two short prompts."""
        import torch
        from transformers import AutoModelForCausalLM, DynamicCache

        self.uses_flash_attention = False
        self._torch: Any = torch
        self._new_cache: Any = DynamicCache
        torch.set_num_threads(self.settings["threads"])
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            str(self.model.parent),
            gguf_file=self.model.name,
            dtype=getattr(torch, self.settings["dtype"]),
        ).eval()
        with torch.inference_mode():
            short = self.case.documents[0].prefix[:_WARM_TOKENS]
            self._answer_wave(self._read(short), len(short), [short, short[1:]], 2)

    def prepare(self) -> None:
        """Nothing: no cache outlives its document."""

    def run(self) -> Outcome:
        """Document after document, wave after wave."""
        outcome = Outcome(0.0, [[] for _ in self.case.documents], 0)
        started = time.perf_counter()
        with self._torch.inference_mode():
            for document, outputs in zip(self.case.documents, outcome.outputs, strict=True):
                prefix = () if self.case.is_cold else document.prefix
                rests = document.prompts if self.case.is_cold else document.rests
                cache = self._read(prefix)
                if prefix and not outcome.prefill_seconds:
                    outcome.prefill_seconds = time.perf_counter() - started
                outcome.computed_tokens += len(prefix) + sum(map(len, rests))
                for start in range(0, len(rests), self.settings["wave"]):
                    wave = rests[start : start + self.settings["wave"]]
                    outputs += self._answer_wave(cache, len(prefix), wave, self.case.max_tokens)
        outcome.seconds = time.perf_counter() - started
        return outcome

    def _read(self, prefix: Sequence[int]) -> Any:
        cache = self._new_cache(config=self._model.config)
        if prefix:
            tokens = self._torch.tensor([prefix])
            self._model(tokens, cache=cache, use_cache=True, logits_to_keep=1)
        return cache

    def _answer_wave(
        self, cache: Any, num_shared: int, rests: Sequence[Sequence[int]], max_tokens: int
    ) -> list[list[int]]:
        """The rests are padded on the left, so that all end in the same column."""
        torch = self._torch
        cache = copy.deepcopy(cache)
        if num_shared:
            cache.batch_repeat_interleave(len(rests))
        longest = max(map(len, rests))
        tokens = torch.tensor([[0] * (longest - len(r)) + list(r) for r in rests])
        seen = torch.ones(len(rests), num_shared + longest, dtype=torch.long)
        positions = torch.zeros_like(tokens)
        for row, rest in enumerate(rests):
            padding = longest - len(rest)
            seen[row, num_shared : num_shared + padding] = 0
            positions[row, padding:] = torch.arange(num_shared, num_shared + len(rest))
        outputs = []
        for _ in range(max_tokens):
            logits = self._model(
                tokens,
                attention_mask=seen,
                position_ids=positions,
                cache=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits
            tokens = logits[:, -1].argmax(-1, keepdim=True)
            outputs.append(tokens)
            seen = torch.cat([seen, seen.new_ones(len(rests), 1)], 1)
            positions = positions[:, -1:] + 1
        return [list(map(int, row)) for row in torch.cat(outputs, 1)]

    def close(self) -> None:
        """Free the model."""
        self._model = None
