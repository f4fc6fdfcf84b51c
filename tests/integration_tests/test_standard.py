"""LangChain's own integration tests of a chat model, on SmolLM2."""

from __future__ import annotations

from pathlib import Path

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests

from langchain_swarmkv import ChatSwarmKV


class TestChatSwarmKV(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatSwarmKV]:
        return ChatSwarmKV

    model_path: Path

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _weights_that_round_little(cls, smollm2_f16: Path) -> None:
        """What a model of this size says can hang on the rounding of others."""
        cls.model_path = smollm2_f16

    @property
    def chat_model_params(self) -> dict[str, object]:
        return {"model_path": self.model_path, "n_ctx": 4096, "max_tokens": 256}

    @property
    def structured_output_kwargs(self) -> dict[str, object]:
        # Without a penalty this model repeats itself inside a string until the limit.
        return {"repeat_penalty": 1.1}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return False

    @property
    def supported_usage_metadata_details(self) -> dict[str, list[str]]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        llm = ChatSwarmKV(**self.chat_model_params)
        question = "Which rivers flow through Paris, and which through Rome?"
        llm.invoke(question)
        if not stream:
            return llm.invoke(question)
        chunks = list(llm.stream(question))
        return sum(chunks[1:], chunks[0])

    @pytest.mark.xfail(
        reason="SmolLM2-135M was not trained to call tools: left to itself it called one for 0 of "
        "20 questions about the weather. With tool_choice='any' it calls; see test_tool_calling."
    )
    @pytest.mark.parametrize("model", [{}, {"output_version": "v1"}], indirect=True)
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)
