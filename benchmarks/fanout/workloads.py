"""The workloads: which documents, how many branches, how many tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from langchain_core.messages import HumanMessage

from langchain_swarmkv import (
    DEFAULT_INSTRUCTIONS,
    ChatSwarmKV,
    ConfigurationError,
    document_message,
)

from .case import Case, Document

__all__ = ["WORKLOADS", "CaseBuilder", "Sizes", "build_cases"]

PATENT = Path(__file__).parent / "data" / "patent-us6336130.txt"
SENTENCE = "The quick brown fox jumps over the lazy dog. "
"""The article's document is nothing else."""

QUESTIONS = (
    "What problem does the invention solve, and how was it solved before?",
    "List the parts of the system and say in one sentence what each of them does.",
    "Which step of the method would be hardest to design around, and why?",
    "Restate the first independent claim in plain language.",
    "Which terms of the claims does the description define, and how?",
    "Name the features of the dependent claims that narrow the invention most.",
    "What prior art does the document mention, and what does it say is wrong with it?",
    "Write three search queries that would find similar inventions.",
    "Who would infringe the method claims: the operator, the user or the manufacturer?",
    "Which statements of the description are advantages rather than technical facts?",
    "Summarise the preferred embodiment for an engineer in the field.",
    "Which information does the system store, where, and for how long?",
    "What happens when one of the parts fails? Quote what the text says about it.",
    "Are all features of the first claim supported by the description? Name any that is not.",
    "Which variants does the description mention that no claim covers?",
    "Describe the order of the messages between the parts during normal operation.",
    "Which of the features depend on a certain technology, and which would work with any?",
    "What are the privacy risks for the people whose data the system handles?",
    "Draft an abstract of at most sixty words for a business reader.",
    "What would you ask the inventors before filing in another country?",
)


class Sizes(NamedTuple):
    """What may be given on the command line; None leaves it to the workload."""

    document_tokens: int | None = None
    branches: int | None = None
    max_tokens: int | None = None


def build_cases(llm: ChatSwarmKV, workload: str | None, sizes: Sizes) -> list[Case]:
    """The cases of a workload, or the one case of the sizes.

    Args:
        llm: the model whose template and vocabulary make the prompts; no weights are loaded.
        workload: a key of `WORKLOADS`; None: one document, sizes as given.
        sizes: given sizes replace the workload's own.

    Raises:
        ConfigurationError: there is no such workload, or a branch is longer than the model's
            trained context.
    """
    if workload is not None and workload not in WORKLOADS:
        raise ConfigurationError(
            f"there is no workload {workload!r}; there are {', '.join(WORKLOADS)}."
        )
    make = WORKLOADS[workload] if workload else _custom
    cases = make(CaseBuilder(llm), sizes)
    limit = llm.tokenizer.n_ctx_train
    for case in cases:
        if case.num_positions > limit:
            raise ConfigurationError(
                f"{case.name} needs {case.num_positions} positions for one branch, but the model "
                f"was trained for {limit}. Give fewer --document-tokens or --max-tokens."
            )
    return cases


class CaseBuilder:
    """Cuts texts to a number of tokens and makes them documents with prompts."""

    def __init__(self, llm: ChatSwarmKV) -> None:
        self._llm = llm

    def cut(self, text: str, num_tokens: int, start: float = 0.0) -> str:
        """A stretch of a text that is repeated as often as it takes.

        Args:
            text: where the stretch is from.
            num_tokens: its length, white space at the end excepted.
            start: where it begins, as a share of the text.
        """
        at = text.rfind(" ", 0, int(len(text) * start) + 1) + 1
        text = f"{text[at:]}\n\n{text[:at]}" if at else text
        ids = self._llm.get_token_ids(text)
        while len(ids) < num_tokens:
            text = f"{text.rstrip()}\n\n{text}"
            ids = self._llm.get_token_ids(text)
        return self._llm.tokenizer.decode(ids[:num_tokens]).strip()

    def document(self, text: str, branches: int) -> Document:
        """A document and its prompts, each with another question."""
        shared = [document_message(text)]
        tasks = tuple(map(_question, range(branches)))
        document = Document(
            text=text,
            instructions=DEFAULT_INSTRUCTIONS,
            prefix=tuple(self._llm.prefix_token_ids(shared)),
            tasks=tasks,
            prompts=tuple(
                tuple(self._llm.prompt_token_ids([*shared, HumanMessage(task)])) for task in tasks
            ),
            num_tokens=len(self._llm.get_token_ids(text)),
        )
        assert all(p[: len(document.prefix)] == document.prefix for p in document.prompts)
        return document

    def patent_case(self, name: str, num_tokens: int, branches: int, max_tokens: int) -> Case:
        """One stretch of the patent."""
        text = self.cut(_patent(), num_tokens)
        return Case(name=name, documents=(self.document(text, branches),), max_tokens=max_tokens)

    def stretches(self, count: int, num_tokens: int, branches: int) -> list[Document]:
        """Documents that begin at different places of the patent."""
        return [
            self.document(self.cut(_patent(), num_tokens, number / count), branches)
            for number in range(count)
        ]


def _patent() -> str:
    return PATENT.read_text(encoding="utf-8")


def _question(number: int) -> str:
    question = QUESTIONS[number % len(QUESTIONS)]
    part = number // len(QUESTIONS)
    return f"{question} Look at aspect {part + 1} of your answer only." if part else question


def _custom(builder: CaseBuilder, sizes: Sizes) -> list[Case]:
    document_tokens, branches, max_tokens = _filled(sizes, 1024, 8, 32)
    return [builder.patent_case("custom", document_tokens, branches, max_tokens)]


def _article(builder: CaseBuilder, sizes: Sizes) -> list[Case]:
    document_tokens, branches, max_tokens = _filled(sizes, 3501, 2, 32)
    text = builder.cut(SENTENCE * (document_tokens // 8), document_tokens)
    document = builder.document(text, branches)
    return [Case(name="W1", documents=(document,), max_tokens=max_tokens)]


def _patent_16(builder: CaseBuilder, sizes: Sizes) -> list[Case]:
    return [builder.patent_case("W2", *_filled(sizes, 1024, 16, 64))]


def _patent_50(builder: CaseBuilder, sizes: Sizes) -> list[Case]:
    return [builder.patent_case("W3", *_filled(sizes, 1024, 50, 64))]


def _cold(builder: CaseBuilder, sizes: Sizes) -> list[Case]:
    warm = builder.patent_case("W4-warm", *_filled(sizes, 1024, 8, 32))
    return [warm.model_copy(update={"name": "W4-cold", "is_cold": True}), warm]


def _interleaved(builder: CaseBuilder, sizes: Sizes) -> list[Case]:
    document_tokens, branches, max_tokens = _filled(sizes, 900, 4, 32)
    documents = builder.stretches(8, document_tokens, branches)
    empty = Case(name="W5-empty", documents=tuple(documents[::2]), max_tokens=max_tokens)
    cached = tuple(
        document.model_copy(update={"tasks": (), "prompts": ()}) for document in documents[1::2]
    )
    return [empty, empty.model_copy(update={"name": "W5-cached", "cached": cached})]


def _scaling(builder: CaseBuilder, sizes: Sizes) -> list[Case]:
    lengths: Sequence[int] = (512, 1024, 2048, 4096, 7000)
    fan_outs: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 256)
    if sizes.document_tokens:
        lengths = (sizes.document_tokens,)
    if sizes.branches:
        fan_outs = (sizes.branches,)
    grid = [(length, sizes.branches or 8) for length in lengths]
    grid += [(sizes.document_tokens or 2048, fan_out) for fan_out in fan_outs]
    return [
        builder.patent_case(f"W6-d{length}-b{fan_out}", length, fan_out, sizes.max_tokens or 16)
        for length, fan_out in dict.fromkeys(grid)
    ]


def _filled(
    sizes: Sizes, document_tokens: int, branches: int, max_tokens: int
) -> tuple[int, int, int]:
    return (
        sizes.document_tokens or document_tokens,
        sizes.branches or branches,
        sizes.max_tokens or max_tokens,
    )


WORKLOADS: dict[str, Callable[[CaseBuilder, Sizes], list[Case]]] = {
    "W1": _article,
    "W2": _patent_16,
    "W3": _patent_50,
    "W4": _cold,
    "W5": _interleaved,
    "W6": _scaling,
}
