"""What the copies of one chat model share: the engine, the vocabulary and the documents' texts.

Each copy has a `Seat` in the session. The engine is loaded when one of them needs it and given back
when the last has left, by `leave` or by becoming garbage. A session that ends leaves its engine to
another one with the same settings, if there is one: LangChain's configurable models make an object
for each call, and would otherwise load the model for each.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from langchain_swarmkv.config import EngineConfig, SnapshotSettings
from langchain_swarmkv.engine.contract import Tokenizer
from langchain_swarmkv.errors import EngineClosedError
from langchain_swarmkv.prompts.encoder import PromptEncoder
from langchain_swarmkv.scheduling.registry import (
    acquire_engine,
    acquire_tokenizer,
    release_engine,
)
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine

__all__ = ["EngineKey", "KnownDocument", "Seat"]

EngineKey: TypeAlias = tuple[EngineConfig | None, SnapshotSettings]
"""Engine settings (None: the user's own engine), and where its prefixes go."""

MAX_DOCUMENTS = 256
"""Texts kept for `recall`; the oldest go first."""

_MAX_ENCODERS = 8


@dataclass(frozen=True, eq=False)
class KnownDocument:
    """What this process has prefilled."""

    text: str
    prefix_ids: npt.NDArray[np.int32]


class _Session:
    def __init__(self, key: EngineKey) -> None:
        self.key = key
        # Reentrant: a seat may be found to be garbage at any moment, on this thread too.
        self._lock = threading.RLock()
        # Of its own: whoever copies a model on an event loop must not wait for a load.
        self._seats_lock = threading.RLock()
        self._num_seats = 0
        self.known_tokenizer: Tokenizer | None = None
        self._encoders: list[tuple[object, PromptEncoder]] = []
        self._documents_lock = threading.Lock()
        # By cache salt and digest: a copy with another salt must not recall this one's text.
        self._documents: dict[tuple[str, str], KnownDocument] = {}
        self.loaded_engine: SwarmEngine | None = None
        with _sessions_lock:
            _sessions.add(self)

    def join(self) -> None:
        with self._seats_lock:
            self._num_seats += 1

    def leave(self) -> None:
        with self._seats_lock:
            self._num_seats -= 1
            if self._num_seats:
                return
        with self._lock:  # no seat comes any more: a new one is the copy of another
            engine, self.loaded_engine = self.loaded_engine, None
        if engine is not None and not any(heir.inherit(engine) for heir in _sessions_of(self.key)):
            release_engine(engine)

    def inherit(self, engine: SwarmEngine) -> bool:
        with self._lock:
            if self._num_seats == 0 or self.loaded_engine is not None:
                return False
            self.loaded_engine = engine
            return True

    def leave_later(self) -> None:
        # NOTE: runs wherever the garbage collector does, perhaps under the very locks that closing
        # an engine needs. At interpreter exit the engines close themselves.
        if not sys.is_finalizing():
            threading.Thread(target=self.leave, name="swarmkv-release").start()

    def engine(self) -> SwarmEngine:
        engine = self.loaded_engine
        if engine is not None and not engine.closed:
            return engine
        with self._lock:
            if self._num_seats == 0:
                # The last seat was left while this call waited for the load of another call.
                raise _closed()
            dead = self.loaded_engine
            if dead is not None and dead.closed:
                # A failure ended it; the next call gets a new one.
                self.loaded_engine = None
                release_engine(dead)
            if self.loaded_engine is None:
                config, snapshots = self.key
                assert config is not None
                self.loaded_engine = acquire_engine(config, snapshots)
            return self.loaded_engine

    def tokenizer(self) -> Tokenizer:
        if self.known_tokenizer is None:
            config, _ = self.key
            assert config is not None
            self.known_tokenizer = acquire_tokenizer(config.model_path)
        return self.known_tokenizer

    def encoder(
        self, tokenizer: Tokenizer, chat_template: str | None, variables: Mapping[str, object]
    ) -> PromptEncoder:
        settings = id(tokenizer), chat_template, _told_apart(variables)
        for known, encoder in self._encoders:
            if known == settings:
                return encoder
        encoder = PromptEncoder(tokenizer, chat_template=chat_template, variables=variables)
        self._encoders = [*self._encoders[1 - _MAX_ENCODERS :], (settings, encoder)]
        return encoder

    def remember(self, cache_salt: str, digest: str, document: KnownDocument) -> None:
        with self._documents_lock:
            self._documents.pop((cache_salt, digest), None)
            self._documents[cache_salt, digest] = document
            if len(self._documents) > MAX_DOCUMENTS:
                del self._documents[next(iter(self._documents))]

    def recall(self, cache_salt: str, digest: str) -> KnownDocument | None:
        with self._documents_lock:
            return self._documents.get((cache_salt, digest))


def _closed() -> EngineClosedError:
    return EngineClosedError("The chat model is closed; make a new one, or use a copy.")


_sessions: weakref.WeakSet[_Session] = weakref.WeakSet()
_sessions_lock = threading.Lock()


def _sessions_of(key: EngineKey) -> list[_Session]:
    with _sessions_lock:
        return [session for session in _sessions if session.key == key]


def _told_apart(value: object) -> object:
    """Equal only for values that templates print alike: 1, 1.0 and True are equal to Python."""
    if isinstance(value, Mapping):
        return dict, tuple((_told_apart(k), _told_apart(v)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_told_apart, value))
    if value is None or isinstance(value, (str, bytes, bool, int, float)):
        return type(value), repr(value)
    return type(value), id(value)  # the encoder keeps it, so that the number stays its own


class Seat:
    """One chat model's place in a session. A copy, shallow or deep, is another seat in it.

    Args:
        key: what the session is about.
        session: the session to join; None: a new one.
    """

    def __init__(self, key: EngineKey, session: _Session | None = None) -> None:
        self._session = session or _Session(key)
        self._session.join()
        self._leave = weakref.finalize(self, self._session.leave_later)
        self._leave.atexit = False

    @property
    def key(self) -> EngineKey:
        """What the session is about."""
        return self._session.key

    def another(self) -> Seat:
        """A second seat in the same session."""
        return Seat(self.key, self._session)

    def move(self, key: EngineKey) -> Seat:
        """Leave for a seat in a session of one's own, about something else."""
        self.leave()
        return Seat(key)

    def leave(self) -> None:
        """Give the seat back; the last one gives the engine back. Harmless twice."""
        if self._leave.detach() is not None:
            self._session.leave()

    def check_open(self) -> None:
        """Refuse to work after `leave`.

        Raises:
            EngineClosedError: this seat was given back.
        """
        if not self._leave.alive:
            raise _closed()

    def engine(self) -> SwarmEngine:
        """The session's engine, loaded if nobody has needed it yet.

        Raises:
            ModelError: the model cannot be loaded.
        """
        self.check_open()
        return self._session.engine()

    @property
    def load(self) -> Callable[[], SwarmEngine]:
        """Gives the session's engine, loaded if need be; equal for all seats of a session."""
        return self._session.engine

    @property
    def known_tokenizer(self) -> Tokenizer | None:
        """The vocabulary, if somebody has needed it yet; reads nothing."""
        return self._session.known_tokenizer

    @property
    def loaded_engine(self) -> SwarmEngine | None:
        """The session's engine if there is one."""
        return self._session.loaded_engine

    def tokenizer(self) -> Tokenizer:
        """The vocabulary of the session's model file; no weights, no lock.

        Raises:
            ModelError: the file cannot be used.
        """
        return self._session.tokenizer()

    def encoder(
        self, tokenizer: Tokenizer, chat_template: str | None, variables: Mapping[str, object]
    ) -> PromptEncoder:
        """The encoder of these settings, made once."""
        return self._session.encoder(tokenizer, chat_template, variables)

    def remember(self, cache_salt: str, digest: str, text: str, prefix_ids: Sequence[int]) -> None:
        """Keep a document for `recall` with the same salt, here and at all other seats."""
        ids = np.asarray(prefix_ids, dtype=np.int32)
        self._session.remember(cache_salt, digest, KnownDocument(text, ids))

    def recall(self, cache_salt: str, digest: str) -> KnownDocument | None:
        """A document, if it was remembered under this salt."""
        return self._session.recall(cache_salt, digest)

    def __copy__(self) -> Seat:
        return self.another()

    def __deepcopy__(self, memo: object) -> Seat:
        return self.another()

    def __reduce__(self) -> tuple[object, ...]:
        # In another process there is nothing to share yet.
        return Seat, (self.key,)
