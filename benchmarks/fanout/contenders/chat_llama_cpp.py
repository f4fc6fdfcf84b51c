"""LangChain's `ChatLlamaCpp` behind the same mutex: messages in, text out."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage

from langchain_swarmkv import document_message

from ..case import Document
from ..contender import Outcome
from ..native import BATCH_TOKENS, rounded_cells
from ..vocabulary import Vocabulary
from .mutex import Mutex

__all__ = ["ChatLlamaCppMutex"]


class ChatLlamaCppMutex(Mutex):
    """The messages that this package's nodes would send; the token ids are overheard."""

    name = "chat-llama-cpp"
    masks_end = True

    @classmethod
    def unavailable(cls) -> str | None:
        """`langchain-community` is an optional extra."""
        if importlib.util.find_spec("langchain_community") is None:
            return "langchain-community is missing: pip install 'langchain-swarmkv[bench-peers]'"
        return None

    def open(self) -> None:
        """Load, and answer once."""
        from langchain_community.chat_models import ChatLlamaCpp

        self.uses_flash_attention = self.settings["flash_attention"]
        self._lock = threading.Lock()
        self._chat = ChatLlamaCpp(
            model_path=str(self.model),
            n_ctx=rounded_cells(self.case.num_positions),
            n_batch=BATCH_TOKENS,
            n_threads=self.settings["threads"],
            n_gpu_layers=self.settings.get("gpu_layers", 0),
            # Zero means what the file says; its own defaults would break every model that was
            # trained with another base.
            rope_freq_base=0.0,
            rope_freq_scale=0.0,
            temperature=0.0,
            repeat_penalty=1.0,
            streaming=False,
            verbose=False,
            model_kwargs={
                "n_ubatch": BATCH_TOKENS,
                "n_threads_batch": self.settings["threads"],
                "flash_attn": self.uses_flash_attention,
            },
        )
        self._llama = self._chat.client
        self._overheard = _Overheard(self._llama)
        with Vocabulary(self.model) as vocabulary:
            self._end_bias = vocabulary.end_bias()
        document = self.case.documents[0]
        shorter = document.model_copy(update={"text": document.text[: 2 * BATCH_TOKENS]})
        self._ask(shorter, document.tasks[0], 2)

    def _answer(self, outcome: Outcome, place: tuple[int, int]) -> None:
        d, b = place
        document = self.case.documents[d]
        with self._lock:
            turn = time.perf_counter()
            num_reused = self._num_reused(document.prompts[b])
            self._ask(document, document.tasks[b], self.case.max_tokens)
            heard = self._overheard
            _check_work(heard, document.prompts[b], self.case.max_tokens)
            outcome.computed_tokens += len(heard.prompt) - num_reused
            outcome.outputs[d][b] = heard.output
            outcome.activation_seconds.append(heard.first_token_at - turn)

    def _ask(self, document: Document, task: str, max_tokens: int) -> None:
        messages: list[BaseMessage] = [
            document_message(document.text, document.instructions),
            HumanMessage(task),
        ]
        self._chat.invoke(messages, max_tokens=max_tokens, logit_bias=self._end_bias)


class _Overheard:
    """The token ids of the last generation, which the chat model gives as text alone."""

    prompt: tuple[int, ...] = ()
    output: list[int]
    first_token_at: float

    def __init__(self, llama: Any) -> None:
        self._generate = llama.generate
        llama.generate = self._listen

    def _listen(self, tokens: Sequence[int], **options: Any) -> Iterator[int]:
        self.prompt, self.output = tuple(tokens), []
        for token in self._generate(tokens, **options):
            if not self.output:
                self.first_token_at = time.perf_counter()
            self.output.append(int(token))
            yield token


def _check_work(heard: _Overheard, prompt: tuple[int, ...], max_tokens: int) -> None:
    if heard.prompt != prompt:
        raise ValueError(
            f"llama-cpp-python renders this chat to {len(heard.prompt)} other tokens than the "
            f"{len(prompt)} of the case; the work is not the same"
        )
    if len(heard.output) != max_tokens:
        raise ValueError(f"{len(heard.output)} tokens were generated instead of {max_tokens}")
