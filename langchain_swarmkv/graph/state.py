"""The state that document and analyst nodes share: plain data, so that it can be checkpointed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from typing_extensions import TypedDict

from langchain_swarmkv.prompts.document import DocumentContent, DocumentRef

__all__ = ["FINDINGS_KEY", "MESSAGES_KEY", "SwarmState", "keep_last", "merge_findings"]

FINDINGS_KEY = "findings"
"""The state key that analysts without an `output_key` write."""

MESSAGES_KEY = "messages"
"""The state key of a conversation, as LangGraph's `MessagesState` names it."""

_T = TypeVar("_T")


def merge_findings(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> dict[str, Any]:
    """Reducer of `findings`: the union; an analyst that runs again replaces what it had written.

    Args:
        old: findings so far, by analyst; None counts as none.
        new: what one node adds.
    """
    return {**(old or {}), **(new or {})}


def keep_last(old: _T, new: _T) -> _T:
    """Reducer of a key that several branches of one step may write: the last one stays.

    Subgraphs that run in parallel all hand their copy of the document back to the parent; without
    a reducer LangGraph refuses that, although the copies are the same.
    """
    return new


class SwarmState(TypedDict, total=False):
    """State of a graph whose analysts read one document. Extend it with keys of your own.

    Nodes need none of it: any state with these keys, TypedDict, dataclass or pydantic, will do.
    """

    document: Annotated[DocumentContent, keep_last]
    """What every analyst reads: a text, a LangChain `Document`, or a list of them."""
    document_ref: Annotated[DocumentRef, keep_last]
    """Written by the document node."""
    findings: Annotated[dict[str, Any], merge_findings]
    """Each analyst's answer, by the analyst's name: a text, or the object of its schema."""
