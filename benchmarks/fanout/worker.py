"""The process of one contender, or of the oracle: `python -m <package>.worker`.

One JSON object a line comes in on stdin and one goes out on stdout, in turn. `{"command": "open",
...}` first, then any number of `run` or `judge`, then `close` or the end of stdin.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .case import Case
from .contender import Contender
from .contenders import load_contender
from .memory import peak_rss_bytes

__all__ = ["main"]

Request = dict[str, Any]
Reply = dict[str, Any]


def main() -> None:
    """Serve until `close`."""
    # What native code prints must not come between the replies.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = _Worker()
    try:
        for line in sys.stdin:
            request = json.loads(line)
            print(json.dumps(worker.serve(request)), file=replies, flush=True)
            if request["command"] == "close":
                break
    finally:
        worker.close({})


class _Worker:
    """One contender and what may be asked of it."""

    def __init__(self) -> None:
        self._contender: Contender | None = None
        self._commands: dict[str, Callable[[Request], Reply]] = {
            "open": self._open,
            "run": self._run,
            "judge": self._judge,
            "close": self.close,
        }

    def serve(self, request: Request) -> Reply:
        """The reply to one request; `error` in it says why there is no other."""
        try:
            return self._commands[request["command"]](request)
        except Exception as error:
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"}

    def _open(self, request: Request) -> Reply:
        case = Case.model_validate_json(Path(request["case"]).read_text(encoding="utf-8"))
        make = load_contender(request["contender"])
        self._contender = make(Path(request["model"]), case, request["settings"])
        self._contender.open()
        return {
            "uses_flash_attention": self._contender.uses_flash_attention,
            "masks_end": self._contender.masks_end,
        }

    def _run(self, request: Request) -> Reply:
        assert self._contender is not None, "open comes before run"
        self._contender.prepare()
        outcome = self._contender.run()
        return {
            "outcome": dataclasses.asdict(outcome),
            "peak_rss_bytes": peak_rss_bytes(self._contender.child_pids()),
        }

    def _judge(self, request: Request) -> Reply:
        from .oracle import judge

        return judge(request)

    def close(self, request: Request) -> Reply:
        """Close the contender; harmless twice."""
        contender, self._contender = self._contender, None
        if contender is not None:
            contender.close()
        return {}


if __name__ == "__main__":
    main()
