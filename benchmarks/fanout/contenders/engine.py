"""The engine alone: token ids in, token ids out, all submitted from one thread."""

from __future__ import annotations

import time

from langchain_swarmkv import SamplingParams

from ..swarm import SwarmContender

__all__ = ["Engine"]


class Engine(SwarmContender):
    """`SwarmEngine.submit` for each document, then for each branch."""

    name = "engine"

    def _ask(self) -> float:
        started = time.perf_counter()
        if not self.case.is_cold:
            prefill = SamplingParams(max_tokens=0)
            documents = [self.engine.submit(d.prefix, prefill) for d in self.case.documents]
            for handle in documents:
                handle.result()
        params = SamplingParams(max_tokens=self.case.max_tokens, ignore_eos=True)
        branches = [
            self.engine.submit(self.case.documents[d].prompts[b], params, keep_prefix=False)
            for d, b in self.case.interleaved
        ]
        for handle in branches:
            handle.result()
        return time.perf_counter() - started
