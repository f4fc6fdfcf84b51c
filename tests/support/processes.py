"""Code for processes of their own."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]

WITHOUT_LANGCHAIN = f"""
import sys, types
root = sys.modules["langchain_swarmkv"] = types.ModuleType("langchain_swarmkv")
root.__path__ = [{str(ROOT / "langchain_swarmkv")!r}]
"""
"""To begin with: leaves the package's root out, which imports LangChain. That would take longer
than most of what is run, and the engine and all below it need nothing of it."""
