"""What every contender is given: documents, and for each the prompts of its branches, as token ids.

Made once by the parent process and handed to each worker as JSON, so that all do the same work.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["Case", "Document"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Document(_Frozen):
    """One document and its branches."""

    text: str
    instructions: str
    """What stands before the document in the system message."""
    prefix: tuple[int, ...]
    """Token ids that all prompts of this document begin with."""
    tasks: tuple[str, ...]
    """What each branch is asked, as text: for contenders that render the prompt themselves."""
    prompts: tuple[tuple[int, ...], ...]
    """The whole prompt of each branch, `prefix` included, with the model's own template."""
    num_tokens: int = 0
    """Tokens of the text alone, for the report."""

    @property
    def rests(self) -> list[tuple[int, ...]]:
        """What follows `prefix` in each prompt."""
        return [prompt[len(self.prefix) :] for prompt in self.prompts]


class Case(_Frozen):
    """One workload at one size."""

    name: str
    """W1 ... W6, with a suffix where a workload has several cases."""
    documents: tuple[Document, ...]
    max_tokens: int
    """Output tokens of every branch; the end of text is ignored."""
    is_cold: bool = False
    """All branches at once and nothing prefilled before: no contender may touch the document
    first."""
    cached: tuple[Document, ...] = ()
    """Documents read before the clock starts, which stay cached if the contender keeps any."""

    @property
    def num_branches(self) -> int:
        """Branches of all documents."""
        return sum(len(document.prompts) for document in self.documents)

    @property
    def num_shared_tokens(self) -> int:
        """Prompt tokens if each document is computed once."""
        return sum(
            len(document.prefix) + sum(map(len, document.rests)) for document in self.documents
        )

    @property
    def num_positions(self) -> int:
        """Tokens of the longest branch, its output included."""
        return self.max_tokens + max(len(p) for doc in self.documents for p in doc.prompts)

    @property
    def interleaved(self) -> list[tuple[int, int]]:
        """(document, branch) in the order of submission: the first branch of each document, ..."""
        most = max(len(document.prompts) for document in self.documents)
        return [
            (d, b)
            for b in range(most)
            for d, document in enumerate(self.documents)
            if b < len(document.prompts)
        ]

    @property
    def num_cells(self) -> int:
        """Cells that all documents and branches need at once, each document counted once."""
        return sum(
            len(document.prefix)
            + sum(len(p) - len(document.prefix) + self.max_tokens for p in document.prompts)
            for document in (*self.documents, *self.cached)
        )

    def cells_of(self, branches: int) -> int:
        """Cells that all documents and so many branches, the longest, need at once."""
        documents = (*self.documents, *self.cached)
        rests = sorted(len(p) - len(d.prefix) for d in documents for p in d.prompts)
        own = sum(rest + self.max_tokens for rest in rests[-branches:])
        return sum(len(document.prefix) for document in documents) + own

    def with_branches(self, most: int) -> Case:
        """The same with at most that many branches of each document."""
        documents = tuple(
            document.model_copy(
                update={"tasks": document.tasks[:most], "prompts": document.prompts[:most]}
            )
            for document in self.documents
        )
        return self.model_copy(update={"documents": documents})
