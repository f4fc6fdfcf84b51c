"""Servers that stand in for the peers': the same endpoints, no model. Run as a script.

    peer_servers.py -C config.json                      the example server
    peer_servers.py --host H --port P --slot-save-path  llama-server

They remember prompts until they are emptied. A prompt that ends with 13 gets one token too few.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SHORT = 13


class Cache:
    """Prompts seen, and tokens computed."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.computed = 0
        self._lock = threading.Lock()

    def read(self, prompt: list[int]) -> int:
        """Compute what no earlier prompt begins with."""
        with self._lock:
            known = max((num_shared(prompt, seen) for seen in self.prompts), default=0)
            self.prompts.append(prompt)
            self.computed += len(prompt) - known
        return len(prompt) - known


def num_shared(one: list[int], other: list[int]) -> int:
    """Tokens that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


CACHE = Cache()


class Handler(BaseHTTPRequestHandler):
    """Each path is a method's suffix."""

    def do_GET(self) -> None:
        if self.path == "/metrics":
            kept = sum(map(len, CACHE.prompts))
            text = (
                f"# TYPE llamacpp:prompt_tokens_total counter\n"
                f"llamacpp:prompt_tokens_total {CACHE.computed}\n"
                f"batch_server:radix_trie_tokens {kept}\n"
            )
            return self._reply(200, text)
        return self._reply(200 if self.path in ("/healthz", "/health") else 404, "{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/embeddings":
            CACHE.prompts.clear()
            return self._reply(400, '{"detail": "no embeddings"}')
        if self.path.startswith("/slots/"):
            CACHE.prompts.clear()
            return self._reply(200, "{}")
        answer = {"/completion": native_answer, "/v1/completions": openai_answer}[self.path](body)
        return self._reply(200, json.dumps(answer))

    def _reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None: ...


def native_answer(body: dict[str, Any]) -> dict[str, Any]:
    """llama-server's: the last ids of the prompt, and one though none was asked for."""
    assert body["ignore_eos"]
    computed = CACHE.read(body["prompt"])
    wanted = max(1, body["n_predict"])
    short = body["prompt"][-1] == SHORT
    return {"tokens": body["prompt"][-wanted:][short:], "timings": {"prompt_n": computed}}


def openai_answer(body: dict[str, Any]) -> dict[str, Any]:
    """The example server's: one letter, again and again."""
    assert body["logit_bias"]
    CACHE.read(body["prompt"])
    generated = body["max_tokens"] - (body["prompt"][-1] == SHORT)
    usage = {"completion_tokens": generated}
    return {"choices": [{"text": chr(97 + body["prompt"][-1] % 26) * generated}], "usage": usage}


def main(arguments: list[str]) -> None:
    """Listen until terminated."""
    if "-C" in arguments:
        config = json.loads(Path(arguments[arguments.index("-C") + 1]).read_text())
        if "broken" in config["model"]["path"]:
            sys.exit("cannot load the model")
        port = config["server"]["port"]
    else:
        port = int(arguments[arguments.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
