"""LangChain's own integration tests of a chat model, on SmolLM2."""

from __future__ import annotations

from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests

from langchain_swarmkv import ChatSwarmKV
from tests.support.models import smollm2_path


class TestChatSwarmKV(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatSwarmKV]:
        return ChatSwarmKV

    @property
    def chat_model_params(self) -> dict[str, object]:
        return {"model_path": smollm2_path(), "n_ctx": 4096, "max_tokens": 128}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return False

    @property
    def supported_usage_metadata_details(self) -> dict:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        llm = ChatSwarmKV(**self.chat_model_params)
        question = "Which rivers flow through Paris, and which through Rome?"
        llm.invoke(question)
        if not stream:
            return llm.invoke(question)
        chunks = list(llm.stream(question))
        return sum(chunks[1:], chunks[0])
