"""The contenders by name; a module is imported only when its contender is asked for."""

from __future__ import annotations

from importlib import import_module

from ..contender import Contender

__all__ = ["CONTENDERS", "DEFAULT_CONTENDERS", "load_contender"]

CONTENDERS = {
    "fresh-context": ".fresh_context:FreshContext",
    "mutex": ".mutex:Mutex",
    "chat-llama-cpp": ".chat_llama_cpp:ChatLlamaCppMutex",
    "llama-server": ".llama_server:LlamaServer",
    "copy-per-branch": ".copy_per_branch:CopyPerBranch",
    "transformers": ".transformers_cache:TransformersCache",
    "example-server": ".example_server:ExampleServer",
    "engine": ".engine:Engine",
    "chat-model": ".chat_model:ChatModel",
    "graph": ".graph:Graph",
    "floor": ".floor:Floor",
}
"""`module:Class`, relative to this package."""

DEFAULT_CONTENDERS = ("fresh-context", "mutex", "engine", "chat-model", "graph", "floor")


def load_contender(reference: str) -> type[Contender]:
    """Import `module:Class`; a module that begins with a dot stands in this package."""
    module, _, name = reference.partition(":")
    contender: type[Contender] = getattr(import_module(module, __name__), name)
    return contender
