"""The KV of one token list as bytes, with everything that says whose it is.

A snapshot never leaves its **namespace**: the digest of a model identity and a cache salt. The
salt itself is not kept, so it cannot reach a file name or a log.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from langchain_swarmkv.engine.identity import ModelIdentity
from langchain_swarmkv.errors import SnapshotError
from langchain_swarmkv.snapshots.prefix_index import TokenIds

__all__ = ["KVSnapshot", "prefix_namespace", "snapshot_key"]

_BYTES_PER_TOKEN = 4
_BYTES_PER_LOGIT = 4
_KINDS: dict[str, tuple[type, ...]] = {
    "identity": (ModelIdentity,),
    "namespace": (str,),
    "tokens": (tuple,),
    "state": (bytes,),
    "logits": (bytes, type(None)),
    "model_name": (str,),
    "extra": (bytes,),
}
_NEVER_EMPTY = ("namespace", "tokens", "state")


@dataclass(frozen=True)
class KVSnapshot:
    """What `Engine.save` gave for a sequence that held exactly `tokens`.

    Immutable, so whoever holds one may restore it, whatever its store does meanwhile.

    Raises:
        SnapshotError: a field is empty or of another type, or a token id is not an int in
            [0, 2**31).
    """

    identity: ModelIdentity
    """`ModelFacts.identity` of the engine that saved it."""
    namespace: str
    """`prefix_namespace(identity.digest, cache_salt)` of the requests that may use it."""
    tokens: tuple[int, ...] = field(repr=False)
    """The sequence's tokens, one per position from 0."""
    state: bytes = field(repr=False)
    """The engine's own encoding; opaque here."""
    logits: bytes | None = field(default=None, repr=False)
    """Logits after the last token, float32 little-endian, one for each token of the vocabulary.
    With them a prompt of exactly these tokens can go on without computing any."""
    model_name: str = ""
    """For people."""
    extra: bytes = field(default=b"", repr=False)
    """The caller's own, kept with it: the text of a document, say."""

    def __post_init__(self) -> None:
        for name, kinds in _KINDS.items():
            value: object = getattr(self, name)
            if not isinstance(value, kinds):
                expected = " or ".join(kind.__name__ for kind in kinds)
                raise SnapshotError(
                    f"a snapshot's {name} must be {expected}, not {type(value).__name__}",
                    field=name,
                )
            if not value and name in _NEVER_EMPTY:
                raise SnapshotError(f"a snapshot's {name} must not be empty", field=name)
        if len(self.logits or b"") % _BYTES_PER_LOGIT:
            raise SnapshotError("a snapshot's logits must be float32s", field="logits")
        _check_token_ids(self.tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens, and so positions, of the saved sequence."""
        return len(self.tokens)

    @property
    def num_logits(self) -> int:
        """Tokens of the vocabulary that `logits` speak of; 0: there are none."""
        return len(self.logits or b"") // _BYTES_PER_LOGIT

    @property
    def num_bytes(self) -> int:
        """Bytes of all that it holds, as a store counts them."""
        payload_bytes = len(self.state) + len(self.logits or b"") + len(self.extra)
        return payload_bytes + _BYTES_PER_TOKEN * self.num_tokens

    @cached_property
    def key(self) -> str:
        """`snapshot_key` of this snapshot: its name in a store."""
        return snapshot_key(self.identity.digest, self.namespace, self.tokens)


def prefix_namespace(identity: str, cache_salt: str) -> str:
    """The namespace of a model identity and a cache salt: SHA-256, hexadecimal.

    Prefixes are shared within a namespace only. Callers that give no salt share the one of "".
    """
    return _digest(_utf8(identity), _utf8(cache_salt))


def snapshot_key(identity: str, namespace: str, tokens: TokenIds) -> str:
    """A snapshot's name: SHA-256, hexadecimal, the same in every process.

    A key names an entry; it never proves that tokens are equal. Stores compare those.
    """
    token_bytes = np.asarray(tokens, dtype="<i4").tobytes()
    return _digest(_utf8(identity), _utf8(namespace), token_bytes)


def _digest(*parts: bytes) -> str:
    """SHA-256 over the parts, each after its length, so that no two lists of parts run together."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogatepass")


def _check_token_ids(tokens: Sequence[int]) -> None:
    try:
        smallest = min(array("i", tokens))
    except (TypeError, OverflowError) as error:
        raise SnapshotError(f"a snapshot's tokens must be ints below 2**31: {error}") from error
    if smallest < 0:
        raise SnapshotError(f"a token id is {smallest}, but ids start at 0", token_id=smallest)
