"""Documents of a chat model: prefilled once, kept, handed on, saved and loaded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig

from langchain_swarmkv.chat_models.engine_model import EngineModel
from langchain_swarmkv.chat_models.threads import on_own_thread, on_thread, start_on_thread
from langchain_swarmkv.config import SamplingParams
from langchain_swarmkv.errors import DocumentMissingError, SnapshotFormatError
from langchain_swarmkv.prompts.clock import as_instant, run_digests
from langchain_swarmkv.prompts.document import (
    DocumentRef,
    document_digest,
    document_message,
    document_parts,
)
from langchain_swarmkv.prompts.messages import as_messages, template_messages
from langchain_swarmkv.prompts.time_notes import write_note
from langchain_swarmkv.scheduling.request import PrefillProgress, RequestHandle
from langchain_swarmkv.snapshots.snapshot import KVSnapshot, prefix_namespace, snapshot_key
from langchain_swarmkv.snapshots.snapshot_file import expanded, read_snapshot, save_snapshot
from langchain_swarmkv.snapshots.wrapping import SnapshotCipher
from langchain_swarmkv.statistics import RequestStatistics

__all__ = ["DocumentModel"]

ProgressCallback = Callable[[PrefillProgress], None]


class DocumentModel(EngineModel):
    """What a chat model does with texts that many calls share; `ChatSwarmKV` documents it."""

    def prefill(
        self,
        messages: LanguageModelInput,
        *,
        pin: bool = True,
        persist: bool = False,
        prompt_time: datetime | str | None = None,
        earlier: DocumentRef | None = None,
        config: RunnableConfig | None = None,
        on_progress: ProgressCallback | None = None,
        on_finish: Callable[[RequestStatistics], None] | None = None,
    ) -> DocumentRef:
        """Compute what all conversations that begin with these messages share.

        Doing it again costs nothing while it is in the cache.

        Args:
            messages: usually one `document_message`.
            pin: never evict it, until `release`.
            persist: it is on disk when this returns, whatever `snapshot_policy` says.
            prompt_time: date and time for a template that writes them. None: as the last time in
                this process, and the present for messages that are new to it.
            earlier: a reference, from a checkpoint say; if it stands for these messages, its
                prompt_time is theirs.
            config: of the run that asks; names the request.
            on_progress: called on the engine's thread after each chunk; must be quick.
            on_finish: called once at the end, on the calling thread.
        """
        document, handle = self._start_prefill(
            messages, config, pin=pin, persist=persist, prompt_time=prompt_time, earlier=earlier
        )
        progress = _Progress(handle, on_progress, on_finish)
        with handle:
            handle.result()
        progress.finish()
        return self._remember(document)

    async def aprefill(
        self,
        messages: LanguageModelInput,
        *,
        pin: bool = True,
        persist: bool = False,
        prompt_time: datetime | str | None = None,
        earlier: DocumentRef | None = None,
        config: RunnableConfig | None = None,
        on_progress: ProgressCallback | None = None,
        on_finish: Callable[[RequestStatistics], None] | None = None,
    ) -> DocumentRef:
        """Like `prefill`; cancelling it stops the work within one chunk."""
        await self._aload()
        document, handle = await start_on_thread(
            lambda: self._start_prefill(
                messages, config, pin=pin, persist=persist, prompt_time=prompt_time, earlier=earlier
            ),
            handle_of=lambda started: started[1],
        )
        progress = _Progress(handle, on_progress, on_finish)
        with handle:
            await handle.aresult()
        progress.finish()
        if document.noted is None:
            return self._remember(document)
        return await on_thread(lambda: self._remember(document))  # it writes a note

    def _start_prefill(
        self,
        given: LanguageModelInput,
        config: RunnableConfig | None,
        *,
        pin: bool,
        persist: bool,
        prompt_time: datetime | str | None,
        earlier: DocumentRef | None,
    ) -> tuple[_Document, RequestHandle]:
        messages = as_messages(given)
        if prompt_time is None and earlier is not None and self._is_of(earlier, messages):
            prompt_time = earlier["prompt_time"]
        instant = self._document_instant(messages, prompt_time)
        ids = self._encoder.shared_prefix(messages, instant)
        text, instructions = document_parts(messages)
        document = self._document(ids, text, instructions, instant)
        if instant is not None:
            turns = template_messages(messages)
            noted = run_digests(self.cache_salt, turns)[-1]
            document = dataclasses.replace(document, noted=noted)
        handle = self._send(
            ids,
            SamplingParams(max_tokens=0),
            name=_request_name(config),
            pin=document.ref["digest"] if pin else None,
            persist=persist,
        )
        return document, handle

    def _is_of(self, ref: DocumentRef, messages: Sequence[BaseMessage]) -> bool:
        """Whether a reference that has a time stands for these messages."""
        if "prompt_time" not in ref or not self._encoder.reads_clock:
            return False
        ids = self._encoder.shared_prefix(messages, as_instant(ref["prompt_time"]))
        identity = self._engine().facts.identity.digest
        return ref["digest"] == document_digest(self.cache_salt, identity, ids)

    def _document(
        self, ids: Sequence[int], text: str, instructions: str, instant: datetime | None
    ) -> _Document:
        identity = self._engine().facts.identity.digest
        ref = DocumentRef(
            digest=document_digest(self.cache_salt, identity, ids),
            num_tokens=len(ids),
            model=identity,
            text_key="document",
            instructions=instructions,
        )
        if instant is not None:
            ref["prompt_time"] = instant.isoformat()
        return _Document(ref, text, ids)

    def _remember(self, document: _Document) -> DocumentRef:
        self._seat.remember(self.cache_salt, document.ref["digest"], document.text, document.ids)
        folder, identity = self._snapshot_folder, document.ref["model"]
        if folder is not None and document.noted is not None:
            namespace = prefix_namespace(identity, self.cache_salt)
            key = snapshot_key(identity, namespace, document.ids)
            write_note(folder, document.noted, document.ref["prompt_time"], key)
        return document.ref

    def handoff(self, messages: LanguageModelInput) -> DocumentRef:
        """Keep a whole conversation for whoever goes on with it: another node, agent or process.

        The next call that begins with these messages computes none of them; with `snapshot_dir`
        also in another process, on a model with the same settings.

        Args:
            messages: the conversation so far, answers included.
        """
        return self.prefill(messages, pin=False, persist=self._engine().has_disk)

    async def ahandoff(self, messages: LanguageModelInput) -> DocumentRef:
        """Like `handoff`."""
        await self._aload()
        has_disk = await on_thread(lambda: self._engine().has_disk)
        return await self.aprefill(messages, pin=False, persist=has_disk)

    def save(self, ref: DocumentRef, path: Path | str, *, key: bytes | None = None) -> int:
        """Write a prefilled document to a file of its own, with its text, for `load`.

        It is computed again first, as far as it is not in the cache. The file holds the document
        in a recoverable form, unless there is a key.

        Args:
            ref: from `prefill`, `handoff` or `load`.
            path: replaced once the new file is whole.
            key: 32 bytes; the file is then encrypted (needs the package cryptography).

        Returns:
            The bytes of the file.

        Raises:
            DocumentMissingError: this process has not prefilled the document under this
                `cache_salt`.
            SnapshotStorageError: the file cannot be written.
        """
        known = self._seat.recall(self.cache_salt, ref["digest"])
        if known is None:
            raise DocumentMissingError(
                "This process has not prefilled the document of the reference under this "
                "cache_salt; call prefill first."
            )
        snapshot = self._engine().snapshot(list(known.prefix_ids), cache_salt=self.cache_salt)
        note = {"text": known.text, "instructions": ref["instructions"]}
        if "prompt_time" in ref:
            note["prompt_time"] = ref["prompt_time"]
        snapshot = dataclasses.replace(snapshot, extra=json.dumps(note).encode())
        return save_snapshot(expanded(path), snapshot, _cipher(key))

    async def asave(self, ref: DocumentRef, path: Path | str, *, key: bytes | None = None) -> int:
        """Like `save`, beside the event loop."""
        return await on_own_thread(lambda: self.save(ref, path, key=key))

    def load(self, path: Path | str, *, key: bytes | None = None) -> DocumentRef:
        """Make a document that `save` wrote one that is in the cache; no prefill.

        Raises:
            SnapshotKeyError: the file is encrypted, and `key` is missing or another one.
            SnapshotFormatError: the file is no snapshot, or it is damaged.
            SnapshotMismatchError: it is of another model, of other settings or of another salt, or
                its tokens and its state disagree.
            SnapshotStorageError: the file cannot be read.
        """
        path = expanded(path)
        snapshot = read_snapshot(path, _cipher(key))
        text, instructions, prompt_time = _saved_note(snapshot, path)
        self._engine().insert(snapshot, cache_salt=self.cache_salt)
        instant = None
        if prompt_time is not None:
            # Calls that begin with the document find it, with or without the reference.
            instant = self._document_instant([document_message(text, instructions)], prompt_time)
        return self._remember(self._document(snapshot.tokens, text, instructions, instant))

    async def aload(self, path: Path | str, *, key: bytes | None = None) -> DocumentRef:
        """Like `load`, beside the event loop."""
        return await on_own_thread(lambda: self.load(path, key=key))

    def release(self, ref: DocumentRef) -> bool:
        """Let the document be evicted. False: it was not pinned, which is harmless."""
        engine = self.engine if self.engine is not None else self._seat.loaded_engine
        return engine is not None and engine.release(ref["digest"], cache_salt=self.cache_salt)

    def document_of(self, ref: DocumentRef) -> str | None:
        """The text that this object, or a copy with the same `cache_salt`, prefilled.

        None: it is not known here.
        """
        known = self._seat.recall(self.cache_salt, ref["digest"])
        return None if known is None else known.text


@dataclasses.dataclass(frozen=True)
class _Document:
    """What was, or will be, prefilled."""

    ref: DocumentRef
    text: str
    ids: Sequence[int]
    noted: bytes | None = None
    """Name of the note of its time, beside its snapshot; None: it has no time."""


def _cipher(key: bytes | None) -> SnapshotCipher | None:
    return None if key is None else SnapshotCipher(key)


def _saved_note(snapshot: KVSnapshot, path: Path) -> tuple[str, str, str | None]:
    """Text, instructions and time that `save` put beside a state; a file may have none of them."""
    try:
        note = json.loads(snapshot.extra or b"{}")
        text, instructions = note.get("text", ""), note.get("instructions", "")
        prompt_time = note.get("prompt_time")
        if prompt_time is not None:
            as_instant(prompt_time)
    except (ValueError, RecursionError, AttributeError):
        text, instructions, prompt_time = None, None, None
    if not isinstance(text, str) or not isinstance(instructions, str):
        raise SnapshotFormatError(
            f"What stands beside the state in {path} is no document.",
            path=str(path),
            reason="what stands beside the state is no document",
        )
    return text, instructions, prompt_time


class _Progress:
    """Tells listeners how far a prefill is, and that it has ended."""

    def __init__(
        self,
        handle: RequestHandle,
        listener: ProgressCallback | None,
        on_finish: Callable[[RequestStatistics], None] | None,
    ) -> None:
        self._handle = handle
        self._listener = listener
        self._on_finish = on_finish
        self._told: PrefillProgress | None = None
        if listener is not None:
            handle.on_progress(self._tell)

    def _tell(self, progress: PrefillProgress) -> None:
        assert self._listener is not None
        self._told = progress
        self._listener(progress)

    def finish(self) -> None:
        """Tell the end; its progress only if the last chunk was not told already."""
        if self._listener is not None and self._told != self._handle.progress:
            self._tell(self._handle.progress)
        if self._on_finish is not None:
            self._on_finish(self._handle.statistics)


def _request_name(config: RunnableConfig | None) -> str:
    metadata = (config or {}).get("metadata") or {}
    return str(metadata.get("langgraph_node", ""))
