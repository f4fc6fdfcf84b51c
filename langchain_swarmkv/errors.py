"""One tree for everything this package raises.

    SwarmKVError
    ├── ConfigurationError            a setting is wrong or they contradict each other
    ├── ModelError
    │   ├── ModelNotFoundError        no file at the path
    │   ├── ModelFormatError          the file is no GGUF, or a damaged one
    │   ├── ModelLoadError            llama.cpp could not load it or make a context
    │   └── UnsupportedModelError     the architecture cannot do what is asked
    ├── PromptError
    │   ├── ChatTemplateError         the chat template refused or failed
    │   ├── UnsupportedContentError   a message part this model cannot take
    │   └── DocumentMissingError      neither the cache nor the state has the document
    ├── DocumentError                 a file cannot be read as a document
    ├── RequestError
    │   ├── InvalidRequestError       empty prompt, token id out of range, ...
    │   ├── GrammarError              the grammar or guide cannot be used, or ran dry
    │   ├── RequestCancelledError     cancelled before it finished
    │   └── RequestTimeoutError       its deadline passed
    ├── AnswerError                   the answer is not the object that was asked for
    │   └── TruncatedAnswerError      max_tokens cut it
    ├── ContextBudgetError            more tokens than the context can ever hold
    ├── EngineError
    │   ├── EngineClosedError         closed, by a call or by a fatal cause
    │   ├── ForkedProcessError        used in a forked child process
    │   ├── SequenceError             a fork, save or restore that the model cannot do
    │   └── DecodeError               llama_decode failed
    │       ├── NoRoomError           code 1: no cells for the batch; the cache is unchanged
    │       ├── DecodeAbortedError    code 2: the abort callback stopped it
    │       ├── InvalidBatchError     code -1: our batch was wrong
    │       └── DecodeFatalError      below -1: part of the batch may be in the cache
    ├── SnapshotError                 a snapshot is malformed, or its store is closed
    │   ├── SnapshotFormatError       the file is no snapshot, damaged, or another release's
    │   ├── SnapshotKeyError          it is encrypted, and the key is missing or wrong
    │   ├── SnapshotMismatchError     it is of another model or of other settings
    │   └── SnapshotStorageError      the file system does not let it be read or written
    ├── GraphError
    │   ├── UnreachableAnalystError   no document node comes before an analyst
    │   ├── UnboundedCycleError       analysts in a cycle without a bound on its turns
    │   └── MissingReducerError       parallel writers on a key with no reducer
    └── DeviceLockError
        ├── DeviceLockTimeoutError    not granted in time
        └── DeviceLockNotHeldError    released by one who does not hold it

Each says what was seen, what the limit was and what to do. The facts are attributes.
`retryable` tells whether the same call may succeed later. It agrees with LangGraph's
default retry policy, which never retries ValueError, RuntimeError or OSError and retries
other exceptions: so what must not be retried inherits one of those, and the rest does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

__all__ = [
    "AnswerError",
    "ChatTemplateError",
    "ConfigurationError",
    "ContextBudgetError",
    "DecodeAbortedError",
    "DecodeError",
    "DecodeFatalError",
    "DeviceLockError",
    "DeviceLockNotHeldError",
    "DeviceLockTimeoutError",
    "DocumentError",
    "DocumentMissingError",
    "EngineClosedError",
    "EngineError",
    "ForkedProcessError",
    "GrammarError",
    "GraphError",
    "InvalidBatchError",
    "InvalidRequestError",
    "MissingReducerError",
    "ModelError",
    "ModelFormatError",
    "ModelLoadError",
    "ModelNotFoundError",
    "NoRoomError",
    "PromptError",
    "RequestCancelledError",
    "RequestError",
    "RequestTimeoutError",
    "SequenceError",
    "SnapshotError",
    "SnapshotFormatError",
    "SnapshotKeyError",
    "SnapshotMismatchError",
    "SnapshotStorageError",
    "SwarmKVError",
    "TruncatedAnswerError",
    "UnboundedCycleError",
    "UnreachableAnalystError",
    "UnsupportedContentError",
    "UnsupportedModelError",
]


class SwarmKVError(Exception):
    """Base of every error of this package; facts given by keyword become attributes."""

    retryable: ClassVar[bool] = False
    hint: ClassVar[str] = ""

    def __init__(self, message: str, **facts: object) -> None:
        super().__init__(message)
        self.facts = facts
        self.__dict__.update(facts)
        if self.hint:
            self.add_hint(self.hint)

    def add_hint(self, hint: str) -> None:
        """Append one line of advice, shown below the message (a note, PEP 678)."""
        notes = self.__dict__.setdefault("__notes__", [])
        notes.append(hint)

    def __reduce__(self) -> tuple[object, ...]:
        notes = self.__dict__.get("__notes__")
        state = {"__notes__": list(notes)} if notes else None
        return (_rebuild, (type(self), str(self), self.facts), state)


def _rebuild(kind: type[SwarmKVError], message: str, facts: dict[str, object]) -> SwarmKVError:
    return kind(message, **facts)


class ConfigurationError(SwarmKVError, ValueError):
    """A setting is wrong, or two settings contradict each other."""


class ModelError(SwarmKVError, RuntimeError):
    """The model file cannot be used."""

    path: Path


class ModelNotFoundError(ModelError):
    """There is no file at the model's path."""


class ModelFormatError(ModelError):
    """The file is not a GGUF model, or it is damaged."""


class ModelLoadError(ModelError):
    """llama.cpp could not load the model or could not make a context for it."""


class UnsupportedModelError(ModelError):
    """The model's architecture cannot do what is asked."""


class PromptError(SwarmKVError, ValueError):
    """The messages cannot be turned into a prompt."""


class ChatTemplateError(PromptError):
    """The chat template refused the messages, or failed while rendering them."""


class UnsupportedContentError(PromptError):
    """A message holds a part (an image, say) that this model cannot take."""


class DocumentMissingError(PromptError):
    """A document reference was given, but neither cache nor state has its text."""


class DocumentError(SwarmKVError, ValueError):
    """A file cannot be read as a document; `path` says which, and `reason` why."""


class RequestError(SwarmKVError):
    """One request failed; the engine goes on."""

    retryable = True


class InvalidRequestError(RequestError, ValueError):
    """The request can never be served as it is."""

    retryable = False


class GrammarError(RequestError, ValueError):
    """The grammar or guide does not parse, is too large, or allows no further token."""

    retryable = False


class RequestCancelledError(RequestError, RuntimeError):
    """The request was cancelled before it finished."""

    retryable = False


class RequestTimeoutError(RequestError):
    """The request's deadline passed before it finished."""

    timeout_seconds: float | None
    hint = (
        "Raise the limit (timeout of ChatSwarmKV, timeout_seconds of SwarmEngine and its handles), "
        "lower max_tokens, or ask for fewer branches at once."
    )


class AnswerError(SwarmKVError):
    """The answer is not the object that was asked for; `text` is what the model wrote.

    A sampled answer may be right the next time, so an `AnalystNode` raises this, and LangGraph's
    default policy tries again. The error of a greedy answer, which would come out the same, and
    every error of `with_structured_output`, is LangChain's `OutputParserException` too, which is a
    ValueError and is not tried again by itself.
    """

    retryable = True
    text: str


class TruncatedAnswerError(AnswerError):
    """The token limit cut the answer before the object was whole."""

    num_output_tokens: int | None


class ContextBudgetError(SwarmKVError, ValueError):
    """More tokens are asked for than the context can ever hold.

    Attributes (those that apply):
        needed_tokens: what was asked for.
        limit_tokens: what there is.
        limit_name: `n_ctx` (cells of the pool) or `n_ctx_train` (positions of one sequence).
        report: the `BudgetReport`, when raised by the compile-time check.
    """

    needed_tokens: int
    limit_tokens: int
    limit_name: str
    report: Any


class EngineError(SwarmKVError):
    """The engine cannot do its work."""

    retryable = True


class EngineClosedError(EngineError, RuntimeError):
    """The engine was closed, by `close()` or by a failure named as its cause."""

    retryable = False


class ForkedProcessError(EngineError, RuntimeError):
    """llama.cpp was loaded before `os.fork()`; its threads do not exist in the child."""

    retryable = False
    hint = "Start worker processes with the 'spawn' method, or load the model after forking."


class SequenceError(EngineError, RuntimeError):
    """A sequence cannot be forked, saved or restored as asked."""

    retryable = False


class DecodeError(EngineError):
    """llama_decode failed; `return_code` is llama.cpp's (`include/llama.h`)."""

    return_code: int


class NoRoomError(DecodeError):
    """Return code 1: no free cells for the batch; the cache is as it was before."""


class DecodeAbortedError(DecodeError):
    """Return code 2: the abort callback stopped the computation."""


class InvalidBatchError(DecodeError, RuntimeError):
    """Return code -1: the batch was malformed, a fault of this package."""

    retryable = False
    hint = "Please report this with the traceback."


class DecodeFatalError(DecodeError):
    """A return code below -1: part of the batch may already be in the cache."""


class SnapshotError(SwarmKVError, RuntimeError):
    """A snapshot is malformed, or its store is closed."""


class SnapshotFormatError(SnapshotError):
    """The file is no snapshot, damaged, or made by another release; `path` and `reason` say."""

    path: str
    reason: str


class SnapshotKeyError(SnapshotError):
    """The snapshot is encrypted, and the key is missing or another one."""


class SnapshotMismatchError(SnapshotError):
    """The snapshot is of another model or of other settings, or its parts disagree.

    Attributes:
        field: of the identity, the first that differs; or `cache_salt`, `tokens`, `state`,
            `logits`.
        expected: what this engine has there.
        seen: what the snapshot has there.
    """

    field: str
    expected: object
    seen: object


class SnapshotStorageError(SnapshotError):
    """A file or store does not let a snapshot be read or written, or has no room for it."""


class GraphError(SwarmKVError, ValueError):
    """The graph cannot work as it is drawn."""


class UnreachableAnalystError(GraphError):
    """No document node comes before an analyst."""


class UnboundedCycleError(GraphError):
    """Analysts stand in a cycle, and nothing bounds its turns."""


class MissingReducerError(GraphError):
    """Several nodes of one step write a state key that has no reducer."""


class DeviceLockError(SwarmKVError):
    """The device lock could not be used."""

    retryable = True


class DeviceLockTimeoutError(DeviceLockError):
    """The lock was not granted in time; another engine or process holds the device."""


class DeviceLockNotHeldError(DeviceLockError, RuntimeError):
    """The lock was released by one who does not hold it."""

    retryable = False
