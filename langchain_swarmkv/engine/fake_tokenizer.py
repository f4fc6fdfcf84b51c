"""The vocabulary of `FakeEngine`."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_swarmkv.engine.contract import SpecialToken, Tokenizer
from langchain_swarmkv.errors import InvalidRequestError

__all__ = ["BOS_ID", "CHATML", "END_ID", "NUM_TOKENS", "START_ID", "FakeTokenizer"]

BOS_ID, START_ID, END_ID = 256, 257, 258
NUM_TOKENS = 259
_CONTROL = {BOS_ID: "<|bos|>", START_ID: "<|im_start|>", END_ID: "<|im_end|>"}
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class FakeTokenizer(Tokenizer):
    """One token a byte, and three control tokens."""

    def __init__(
        self,
        *,
        n_ctx_train: int = 4096,
        chat_template: str | None = CHATML,
        tool_use_template: str | None = None,
        adds_bos: bool = False,
        name: str = "fake",
    ) -> None:
        self.n_vocab = NUM_TOKENS
        self.n_ctx_train = n_ctx_train
        self.name = name
        self.bos_id = BOS_ID
        self.eos_id = END_ID
        self.adds_bos = adds_bos
        self.chat_template = chat_template
        self.tool_use_template = tool_use_template
        self.special_tokens = {
            text: SpecialToken(token_id, text) for token_id, text in _CONTROL.items()
        }

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of the text."""
        return list(text.encode("utf-8", errors="replace"))

    def token_bytes(self, token_id: int) -> bytes:
        """One byte, or nothing for a control token."""
        if not 0 <= token_id < NUM_TOKENS:
            raise InvalidRequestError(
                f"token id {token_id} is outside the vocabulary of {NUM_TOKENS}.",
                token_id=token_id,
            )
        return bytes([token_id]) if token_id < 256 else b""

    def is_end(self, token_id: int) -> bool:
        """Only `<|im_end|>` ends an answer."""
        return token_id == END_ID

    def readable(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens with the control tokens spelled out."""
        data = b"".join(
            _CONTROL[i].encode() if i in _CONTROL else bytes([i]) for i in map(int, token_ids)
        )
        return data.decode("utf-8", errors="replace")
