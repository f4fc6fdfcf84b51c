"""The chat model: one `ainvoke` for each branch, all at once."""

from __future__ import annotations

import asyncio
import time

from langchain_core.messages import BaseMessage, HumanMessage

from langchain_swarmkv import ChatSwarmKV, document_message

from ..case import Document
from ..swarm import SwarmContender

__all__ = ["ChatModel"]


class ChatModel(SwarmContender):
    """`ChatSwarmKV.aprefill` for each document, then `ainvoke` for all branches together."""

    name = "chat-model"

    def _ask(self) -> float:
        return asyncio.run(self._answer())

    async def _answer(self) -> float:
        started = time.perf_counter()
        with ChatSwarmKV(
            engine=self.engine, max_tokens=self.case.max_tokens, ignore_eos=True
        ) as llm:
            if not self.case.is_cold:
                documents = [[_message(document)] for document in self.case.documents]
                await asyncio.gather(*(llm.aprefill(shared, pin=False) for shared in documents))
            await asyncio.gather(
                *(
                    llm.ainvoke(_conversation(self.case.documents[d], b))
                    for d, b in self.case.interleaved
                )
            )
        return time.perf_counter() - started


def _message(document: Document) -> BaseMessage:
    return document_message(document.text, document.instructions)


def _conversation(document: Document, branch: int) -> list[BaseMessage]:
    return [_message(document), HumanMessage(document.tasks[branch])]
