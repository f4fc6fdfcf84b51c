"""Floor 6: the chat model.

engine_model (settings, the engine behind, prompts) -> documents (what is prefilled, kept, saved) ->
chat (what LangChain asks: answers, tools, objects). threads: submitting beside an event loop.
"""

from langchain_swarmkv.chat_models.chat import ChatSwarmKV

__all__ = ["ChatSwarmKV"]
