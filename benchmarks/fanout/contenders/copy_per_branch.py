"""The article's scheme: the document's state goes to the host, and from there into each branch."""

from __future__ import annotations

import time
from typing import Any

from ..contender import Outcome
from ..native import Context
from .fresh_context import FreshContext

__all__ = ["CopyPerBranch"]


class CopyPerBranch(FreshContext):
    """A snapshot of each document, a new context for each branch, one branch at a time.

    Plain calls without a document node have no snapshot, and compute their whole prompts.
    """

    name = "copy-per-branch"

    def prepare(self) -> None:
        """Drop the snapshots."""
        self._states: list[Any] = []

    def _read_documents(self, outcome: Outcome) -> None:
        if self.case.is_cold:
            return
        started = time.perf_counter()
        for document in self.case.documents:
            with self._context() as context:
                context.prefill(0, document.prefix)
                context.wait()
                outcome.prefill_seconds = outcome.prefill_seconds or time.perf_counter() - started
                self._states.append(context.save(0))
            outcome.computed_tokens += len(document.prefix)

    def _start(self, context: Context, document: int) -> int:
        if not self._states:
            return 0
        context.restore(0, self._states[document])
        return len(self.case.documents[document].prefix)
