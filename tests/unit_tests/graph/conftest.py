"""A chat model without weights, for each test of this folder that wants one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from langchain_swarmkv.chat_models import ChatSwarmKV
from tests.unit_tests.graph.support import echo_task, fake_llm


@pytest.fixture
def llm() -> Iterator[ChatSwarmKV]:
    """Answers `read: <task>`, or `UNREAD: <task>` if the document was not in its prompt."""
    with fake_llm(max_tokens=64, reply=echo_task) as model:
        yield model
