"""Patent analysis: six analysts read one invention disclosure that is prefilled once.

Start with `graph.py`: it is all that an application needs to write. The other modules follow the
run and draw it, for the command `swarmkv demo`.
"""

from __future__ import annotations

from pathlib import Path

DISCLOSURE = Path(__file__).with_name("disclosure.md")
"""The invention disclosure that comes with the example, about 3,100 tokens of SmolLM2."""
