"""The node that prefills the document, once, for all analysts after it."""

from __future__ import annotations

from typing import Any, Optional

from langchain_core.runnables import Runnable, RunnableConfig

from langchain_swarmkv.errors import PromptError
from langchain_swarmkv.graph.node_model import NodeLLM, NodeModel
from langchain_swarmkv.graph.node_run import NodeRun, described, read_key
from langchain_swarmkv.prompts.document import (
    DEFAULT_INSTRUCTIONS,
    DocumentRef,
    document_message,
    document_text,
)

__all__ = ["DocumentNode"]


class DocumentNode(Runnable[Any, dict[str, DocumentRef]]):
    """Reads the document from the state, prefills it and leaves a `DocumentRef` in the state.

    A LangGraph node for any `StateGraph`; sync and async. Running it again (a retry, a resumed
    thread, the next turn of a loop) computes nothing that is still in the cache.

    Events on the `custom` stream: `prefill` while it works, and one `document` at the end.

    Args:
        llm: the model whose cache is filled; it may have retries bound to it.
        input_key: state key of the document: a text, a LangChain `Document`, or a list of them,
            read in their order with a blank line between two. Their metadata is not read.
        output_key: state key of the `DocumentRef`.
        instructions: what all analysts are told before the document.
        pin: keep the document in the pool until `llm.release(ref)`, whatever else comes.
        persist: have it on disk when the node ends, whatever the model's `snapshot_policy`.
    """

    def __init__(
        self,
        llm: NodeLLM,
        *,
        input_key: str = "document",
        output_key: str = "document_ref",
        instructions: str = DEFAULT_INSTRUCTIONS,
        pin: bool = False,
        persist: bool = False,
    ) -> None:
        self._model = NodeModel(llm)
        self.llm = self._model.llm
        self.input_key = input_key
        self.output_key = output_key
        self.instructions = instructions
        self.pin = pin
        self.persist = persist

    def invoke(
        self,
        input: Any,
        # Spelled so that LangGraph passes it to a bound method too (`add_node("a", node.ainvoke)`).
        config: Optional[RunnableConfig] = None,  # noqa: UP045
        **kwargs: Any,
    ) -> dict[str, DocumentRef]:
        """Prefill `input[input_key]`.

        Raises:
            PromptError: there is no text and no `Document` under the key.
            ContextBudgetError: the document is longer than the context.
        """
        run = NodeRun(self.get_name(), config)
        shared = [document_message(self._text(input), self.instructions)]
        options = self._options(input)
        return self._output(
            self._model.call(lambda: run.prefill(self.llm, shared, **options), run.config)
        )

    async def ainvoke(
        self,
        input: Any,
        # Spelled so that LangGraph passes it to a bound method too (`add_node("a", node.ainvoke)`).
        config: Optional[RunnableConfig] = None,  # noqa: UP045
        **kwargs: Any,
    ) -> dict[str, DocumentRef]:
        """Like `invoke`; cancelling it stops the prefill within one chunk."""
        run = NodeRun(self.get_name(), config)
        shared = [document_message(self._text(input), self.instructions)]
        options = self._options(input)
        return self._output(
            await self._model.acall(lambda: run.aprefill(self.llm, shared, **options), run.config)
        )

    def _options(self, state: object) -> dict[str, Any]:
        # A resumed thread has the reference of its first run, and with it the time in its prompts.
        earlier = read_key(state, self.output_key) or None
        return {"pin": self.pin, "persist": self.persist, "earlier": earlier}

    def _text(self, state: object) -> str:
        document = read_key(state, self.input_key)
        text = document_text(document)
        if text is not None and text.strip():
            return text
        is_empty = text is not None or document is None or document == []
        seen = "empty or missing" if is_empty else described(document)
        raise PromptError(
            f"state[{self.input_key!r}] is {seen}; DocumentNode needs the document's text there, a "
            "Document or a list of them. Put it in the graph's input, or name another key as "
            "input_key.",
            key=self.input_key,
        )

    def _output(self, ref: DocumentRef) -> dict[str, DocumentRef]:
        return {self.output_key: {**ref, "text_key": self.input_key}}
