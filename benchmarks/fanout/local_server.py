"""A server on this machine: start it, wait for it, ask it, end it."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import IO, Any

__all__ = ["ServerError", "ServerProcess", "free_port", "get", "post"]

REQUEST_TIMEOUT_SECONDS = 3600.0
_HOST = "127.0.0.1"
_POLL_SECONDS = 0.05
_STOP_SECONDS = 10.0
_MESSAGE_CHARACTERS = 2000
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by way of a proxy


class ServerError(Exception):
    """A server did not start, or refused a request."""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def get(url: str, *, timeout_seconds: float = REQUEST_TIMEOUT_SECONDS) -> str:
    """The text at an address.

    Raises:
        ServerError: an HTTP status that is no success, or no connection.
    """
    return _answer(urllib.request.Request(url), timeout_seconds)


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """What a JSON endpoint answers.

    Raises:
        ServerError: an HTTP status that is no success, or no connection.
    """
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    answer: dict[str, Any] = json.loads(_answer(request, REQUEST_TIMEOUT_SECONDS))
    return answer


def _answer(request: urllib.request.Request, timeout_seconds: float) -> str:
    try:
        with _opener.open(request, timeout=timeout_seconds) as response:
            text: str = response.read().decode()
            return text
    except urllib.error.HTTPError as error:
        with error:
            said = error.read().decode(errors="replace")[:_MESSAGE_CHARACTERS]
        raise ServerError(f"{request.full_url} answered {error.code}: {said}") from error
    except OSError as error:
        raise ServerError(f"{request.full_url} cannot be asked: {error}") from error


class ServerProcess:
    """A server in a process of its own, ready when the constructor returns.

    Args:
        command: what starts it.
        url: where it will listen.
        health: the path that answers once the model is loaded.
        timeout_seconds: it must be ready by then.

    Raises:
        ServerError: it ended, or was not ready in time; with the end of what it wrote.
    """

    def __init__(
        self, command: Sequence[str], url: str, health: str, *, timeout_seconds: float = 300.0
    ) -> None:
        self.url = url
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
            )
        except OSError as error:
            self._log.close()
            raise ServerError(f"{command[0]} cannot be started: {error}") from error
        try:
            self._wait(url + health, time.monotonic() + timeout_seconds)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the server."""
        return self._process.pid

    def _wait(self, health: str, deadline: float) -> None:
        while True:
            try:
                get(health, timeout_seconds=5.0)
                return
            except ServerError as error:
                code = self._process.poll()
                if code is not None:
                    said = self.last_words()
                    raise ServerError(f"the server ended with {code}: {said}") from error
                if time.monotonic() > deadline:
                    raise ServerError(f"the server is not ready: {self.last_words()}") from error
            time.sleep(_POLL_SECONDS)

    def last_words(self) -> str:
        """The end of what it wrote."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-_MESSAGE_CHARACTERS:].strip()

    def close(self) -> None:
        """End it; harmless twice."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()
