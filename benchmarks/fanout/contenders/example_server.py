"""llama-cpp-python's example server: a trie of prompts, forks without a copy, one batch.

It comes with that package's source, not with its wheels: `server_script` in the settings is where
it lies. Its numbers of computed tokens are those of its `/metrics`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..case import Case
from ..contender import Contender, Outcome, Settings
from ..local_server import ServerError, ServerProcess, free_port, get, post
from ..native import BATCH_TOKENS, rounded_cells
from ..vocabulary import Vocabulary

__all__ = ["ExampleServer"]

_REQUIRED = ("fastapi", "jinja2", "numpy", "openai", "pydantic", "uvicorn", "websockets")
_MAX_SEQUENCES = 256


class ExampleServer(Contender):
    """The document first, then all branches at once."""

    name = "example-server"
    masks_end = True
    _server: ServerProcess | None = None

    @classmethod
    def candidates(cls, case: Case) -> list[Settings]:
        """Both kernels; cells for one copy of each document, and where it is cold for all copies.

        With room for all, requests that come at once all start; with less they wait for the first
        and share what it read. With several documents it needs twice the room: it keeps what it has
        read, admits more than fits, and fails (llama_decode 1).
        """
        rooms = ["copies", "shared"] if case.is_cold else ["shared"]
        if len(case.documents) > 1:
            rooms = ["double"]
        return [
            {"room": room, "flash_attention": flash} for room in rooms for flash in (False, True)
        ]

    @classmethod
    def unavailable(cls) -> str | None:
        """What the script imports."""
        missing = [name for name in _REQUIRED if importlib.util.find_spec(name) is None]
        if missing:
            return (
                f"the example server needs {', '.join(missing)}: "
                "pip install 'langchain-swarmkv[bench-peers]'"
            )
        return None

    def open(self) -> None:
        """Start the server, and answer once with tokens of no document."""
        self.uses_flash_attention = self.settings["flash_attention"]
        script = self.settings.get("server_script")
        if script is None or not Path(script).is_file():
            raise FileNotFoundError(
                f"server_script is {script!r}; it must be examples/server/server.py of an "
                "unpacked llama-cpp-python source package"
            )
        self._vocabulary = Vocabulary(self.model)
        self._end_bias = {str(token): b for token, b in self._vocabulary.end_bias().items()}
        self._folder = tempfile.TemporaryDirectory()
        port = free_port()
        config = Path(self._folder.name, "config.json")
        config.write_text(
            json.dumps(server_config(self.model, self.case, self.settings, port)), encoding="utf-8"
        )
        command = [sys.executable, str(script), "-C", str(config)]
        self._server = ServerProcess(command, f"http://127.0.0.1:{port}", "/healthz")
        self._complete(self.case.documents[0].prefix[BATCH_TOKENS - 1 :: -1], 2)

    def prepare(self) -> None:
        """Empty the cache, then read what shall be in it."""
        # A request for embeddings drops all sequences, before it is refused for this model.
        with contextlib.suppress(ServerError):
            post(f"{self._url}/v1/embeddings", {"model": "", "input": " "})
        if kept := metric(self._metrics(), "batch_server:radix_trie_tokens"):
            raise ServerError(f"{kept} tokens are still cached; this server cannot be emptied")
        for cached in self.case.cached:
            self._complete(cached.prefix, 0)

    def run(self) -> Outcome:
        """All branches come at once, after their documents."""
        outcome = Outcome(0.0, [[[] for _ in d.prompts] for d in self.case.documents], 0)
        computed_before = self._num_computed()
        started = time.perf_counter()
        for document in () if self.case.is_cold else self.case.documents:
            self._complete(document.prefix, 0)
            outcome.prefill_seconds = outcome.prefill_seconds or time.perf_counter() - started
        with ThreadPoolExecutor(self.case.num_branches) as pool:
            texts = list(pool.map(self._answer, self.case.interleaved))
        outcome.seconds = time.perf_counter() - started
        outcome.computed_tokens = self._num_computed() - computed_before
        for (d, b), text in zip(self.case.interleaved, texts, strict=True):
            outcome.outputs[d][b] = self._vocabulary.encode_exactly(text, self.case.max_tokens)
        return outcome

    def _answer(self, place: tuple[int, int]) -> str:
        d, b = place
        return self._complete(self.case.documents[d].prompts[b], self.case.max_tokens)

    def _complete(self, prompt: Sequence[int], max_tokens: int) -> str:
        assert self._server is not None, "open comes before run"
        body = completion_body(prompt, max_tokens, self._end_bias)
        try:
            answer = post(f"{self._url}/v1/completions", body)
        except ServerError as error:
            raise ServerError(f"{error}; its log ends: {self._server.last_words()}") from error
        return read_completion(answer, max_tokens)

    def _num_computed(self) -> int:
        return metric(self._metrics(), "llamacpp:prompt_tokens_total")

    def _metrics(self) -> str:
        return get(f"{self._url}/metrics")

    @property
    def _url(self) -> str:
        assert self._server is not None, "prepare comes before run"
        return self._server.url

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for owner, end in (("_vocabulary", "close"), ("_folder", "cleanup")):
            if hasattr(self, owner):
                getattr(getattr(self, owner), end)()

    def child_pids(self) -> list[int]:
        """The server."""
        return [] if self._server is None else [self._server.pid]


def server_config(model: Path, case: Case, settings: Settings, port: int) -> dict[str, Any]:
    """Its configuration file: one pool of cells, a sequence for each document and branch."""
    num_documents = len(case.documents) + len(case.cached)
    n_ctx = rounded_cells(case.num_cells + BATCH_TOKENS)
    if settings["room"] == "double":
        n_ctx = rounded_cells(2 * case.num_cells + BATCH_TOKENS)
    if settings["room"] == "copies":
        n_ctx = case.num_branches * rounded_cells(case.num_positions)
    return {
        "server": {"host": "127.0.0.1", "port": port},
        "model": {
            "path": str(model),
            "n_ctx": n_ctx,
            "n_seq_max": min(num_documents + case.num_branches + 2, _MAX_SEQUENCES),
            "n_batch": BATCH_TOKENS,
            "n_ubatch": BATCH_TOKENS,
            "threads": settings["threads"],
            "threads_batch": settings["threads"],
            "n_gpu_layers": settings.get("gpu_layers", 0),
            "kv_unified": True,
            "flash_attn": settings["flash_attention"],
            "store_logits": False,
        },
    }


def completion_body(
    prompt: Sequence[int], max_tokens: int, end_bias: dict[str, float]
) -> dict[str, Any]:
    """A request: greedy, exactly so many tokens."""
    return {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "logit_bias": end_bias,
    }


def read_completion(answer: dict[str, Any], max_tokens: int) -> str:
    """The generated text.

    Raises:
        ValueError: it generated fewer tokens than it should.
    """
    generated = answer["usage"]["completion_tokens"]
    if generated != max_tokens:
        raise ValueError(f"{generated} tokens were generated instead of {max_tokens}")
    return str(answer["choices"][0]["text"])


def metric(metrics: str, name: str) -> int:
    """A counter in the Prometheus text format.

    Raises:
        ServerError: it is not there.
    """
    match = re.search(rf"^{re.escape(name)} (\d+)", metrics, re.MULTILINE)
    if match is None:
        raise ServerError(f"the example server's metrics lack {name}")
    return int(match[1])
