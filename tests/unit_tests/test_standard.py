"""LangChain's own unit tests of a chat model."""

from __future__ import annotations

from pathlib import Path

from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_swarmkv import ChatSwarmKV


class TestChatSwarmKV(ChatModelUnitTests):
    """Construction loads nothing, so the file need not exist."""

    @property
    def chat_model_class(self) -> type[ChatSwarmKV]:
        return ChatSwarmKV

    @property
    def chat_model_params(self) -> dict[str, object]:
        return {"model_path": "model.gguf"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, object], dict[str, object]]:
        return {"SWARMKV_MODEL_PATH": "env.gguf"}, {}, {"model_path": Path("env.gguf")}
