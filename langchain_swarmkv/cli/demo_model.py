"""The demo's own model, from a copy in a number format that CPUs compute fast."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from langchain_swarmkv.cli.console import default_model
from langchain_swarmkv.engine.cores import available_cores
from langchain_swarmkv.engine.weights import cache_folder
from langchain_swarmkv.errors import SwarmKVError
from langchain_swarmkv.native.file_facts import read_file_facts
from langchain_swarmkv.native.quantize import quantize
from langchain_swarmkv.native.weight_types import find_weight_type, has_fast_kernels

__all__ = ["DemoModel", "demo_model"]

_FAST = find_weight_type("q8_0")
"""As good as the file that is shipped, to the eye, and prefills nearly twice as fast."""


class DemoModel(NamedTuple):
    """The file to load, and what to say of it."""

    path: Path
    note: str


def demo_model() -> DemoModel:
    """The model of the extra `demo`; its copy is made once and kept in the user's cache.

    Its own file is Q4_1, which llama.cpp has no fast kernels for. Where the copy cannot be made,
    the file itself is used, and that is said.

    Raises:
        ConfigurationError: the extra is not installed.
    """
    shipped = default_model()
    status = shipped.stat()
    folder = cache_folder() / "models" / f"{status.st_size:x}-{status.st_mtime_ns:x}"
    copy = folder / f"{shipped.stem.rsplit('.', 1)[0]}.{_FAST.label}.gguf"
    note = (
        f"It ran from a {_FAST.label} copy of its file, which prefills nearly twice as fast as the "
        f"shipped number format: {copy}"
    )
    if copy.is_file():
        return DemoModel(copy, note)
    try:
        facts = read_file_facts(shipped)
        if has_fast_kernels(facts.file_type):
            return DemoModel(shipped, "")
        _say(f"making a faster copy of the demo's model, once: {copy}")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        quantize(facts, copy, _FAST, n_threads=available_cores())
    except (SwarmKVError, OSError) as error:
        reason = " ".join(str(error).split())
        return DemoModel(shipped, f"No faster copy of its file could be made ({reason}).")
    return DemoModel(copy, note)


def _say(text: str) -> None:
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)
