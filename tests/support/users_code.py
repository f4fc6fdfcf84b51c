"""What users write, for type checkers: never run. mypy and pyright must accept every line.

A line that they must refuse has an ignore, which they report where it is not needed.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.caches import InMemoryCache
from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.rate_limiters import InMemoryRateLimiter
from langgraph.graph import START
from pydantic import BaseModel, SecretStr

from langchain_swarmkv import (
    AnalystNode,
    AnswerError,
    ChatSwarmKV,
    ContextBudgetError,
    DiskSnapshotStore,
    DocumentNode,
    DocumentRef,
    EngineConfig,
    FakeEngine,
    FlashAttention,
    KVType,
    LoraAdapter,
    SamplingParams,
    SnapshotPolicy,
    SwarmEngine,
    SwarmState,
    SwarmStateGraph,
    TruncatedAnswerError,
    check_budget,
    document_message,
)


class Finding(BaseModel):
    clause: int
    what: str


def search(query: str) -> str:
    """Look something up."""
    return query


# -- settings, spelled as people spell them ------------------------------------------------------


def chat_models(name: str, style: dict[str, Any], tokens: int | None) -> list[ChatSwarmKV]:
    return [
        ChatSwarmKV(model_path="m.gguf"),
        ChatSwarmKV(model_path=Path("m.gguf"), snapshot_dir=Path("kv")),
        ChatSwarmKV(),  # SWARMKV_MODEL_PATH
        ChatSwarmKV(
            model_path="m.gguf",
            snapshot_dir="kv",
            stop="x",
            kv_type_k="q8_0",
            flash_attention="on",
            adapters=[{"path": "style.gguf", "scale": 0.8}],
            api_key="x",
        ),
        ChatSwarmKV(
            model_path=name,
            snapshot_policy="write_back",
            snapshot_memory_bytes=0,
            stop=["x", "y"],
            adapters=(LoraAdapter(path="style.gguf"), style),
            logit_bias={5: -1},
            kv_type_v=KVType.F32,
            flash_attention=FlashAttention.AUTO,
            n_gpu_layers=-1,
            n_threads=2,
            temperature=1,
            seed=7,
            n=3,
            timeout=60,
            chat_template_kwargs={"enable_thinking": False},
            api_key=SecretStr("x"),
            max_retries=2,
            cache_salt="tenant",
            clock=datetime(2026, 12, 1),
            lock_dir="locks",
        ),
        # As code for models of any kind spells "as it is".
        ChatSwarmKV(
            model_path="m.gguf",
            temperature=0,
            max_tokens=None,
            timeout=None,
            max_retries=2,
            stop=None,
            seed=None,
        ),
        ChatSwarmKV(model_path="m.gguf", max_tokens=tokens),
        ChatSwarmKV(
            model_path="m.gguf",
            name="analyst",
            cache=InMemoryCache(),
            verbose=True,
            tags=["a"],
            metadata={"team": "patents"},
            callbacks=[],
            rate_limiter=InMemoryRateLimiter(),
            disable_streaming="tool_calling",
            output_version="v1",
            profile={"max_input_tokens": 1000},
        ),
        ChatSwarmKV(engine=SwarmEngine(FakeEngine(reply="Yes."))),
    ]


def engine_settings(folder: os.PathLike[str]) -> SwarmEngine:
    EngineConfig(model_path="m.gguf")
    SamplingParams(stop="x", logit_bias={1: 2}, temperature=1)
    SamplingParams(stop=["x"], seed=None)
    config = EngineConfig(
        model_path=Path(folder) / "m.gguf",
        adapters=[{"path": "style.gguf"}, LoraAdapter(path=Path("other.gguf"), scale=1)],
        kv_type_k="q8_0",
        kv_type_v=KVType.Q8_0,
        flash_attention="on",
        n_ubatch=None,
        rope_freq_base=10_000,
    )
    SwarmEngine(config, snapshot_dir="kv", snapshot_policy="never")
    SwarmEngine(config, snapshot_policy=SnapshotPolicy.NEVER)
    return SwarmEngine(config, snapshot_store=DiskSnapshotStore("kv", max_bytes=1 << 30))


def slips() -> None:
    ChatSwarmKV(model_pth="m.gguf")  # type: ignore[call-arg]
    ChatSwarmKV(model_path="m.gguf", kv_type_k="q9")  # type: ignore[arg-type]
    ChatSwarmKV(model_path="m.gguf", n_ctx="many")  # type: ignore[arg-type]
    ChatSwarmKV(model_path=5)  # type: ignore[arg-type]
    ChatSwarmKV("m.gguf")  # type: ignore[call-arg]
    EngineConfig()  # type: ignore[call-arg]
    EngineConfig(model_path="m.gguf", flash_attention="maybe")  # type: ignore[arg-type]
    SamplingParams(temprature=1)  # type: ignore[call-arg]


# -- what fields are once they are read ----------------------------------------------------------


def fields(llm: ChatSwarmKV, config: EngineConfig) -> None:
    folder: Path | None = llm.snapshot_dir
    kind: KVType = llm.kv_type_k
    stop: tuple[str, ...] = llm.stop
    path: Path = config.model_path
    adapters: tuple[LoraAdapter, ...] = config.adapters
    print(folder, kind.value, stop, path.name, [adapter.scale for adapter in adapters])
    print(llm.n, llm.temperature, llm.model_name, llm.engine_statistics().num_running)


# -- calls ---------------------------------------------------------------------------------------


def calls(llm: ChatSwarmKV, text: str) -> list[str]:
    answer: AIMessage = llm.invoke([document_message(text), ("human", "Who may terminate?")])
    usage = answer.usage_metadata
    if usage is not None:
        print(usage["input_tokens"], usage.get("input_token_details", {}).get("cache_read"))
    answers = llm.batch(["a", "b"], {"max_concurrency": 2})
    several = llm.generate([[HumanMessage("a")]], n=3).generations[0]
    model: BaseChatModel = llm
    chain = ChatPromptTemplate.from_template("About {topic}") | model | StrOutputParser()
    chain.invoke({"topic": "pumps"})
    llm.bind(seed=1, max_tokens=20).invoke("a")
    llm.with_retry().invoke("a")
    return [*(each.text for each in answers), *(each.text for each in several)]


def parts(llm: ChatSwarmKV) -> str:
    for chunk in llm.stream("a"):
        print(chunk.text)
    found = llm.with_structured_output(Finding).invoke("a")
    call = llm.bind_tools([search, Finding], tool_choice="any").invoke("a")
    with llm.model_copy(update={"max_tokens": 5}) as copied:
        copied.close()
    return str(found) + call.tool_calls[0]["name"]


async def asynchronous(llm: ChatSwarmKV) -> AsyncIterator[AIMessageChunk]:
    await llm.ainvoke("a")
    ref: DocumentRef = await llm.aprefill([document_message("text")], persist=True)
    await llm.asave(ref, "document.kv")
    async for chunk in llm.astream("a"):
        yield chunk


def errors(llm: ChatSwarmKV) -> int | None:
    try:
        llm.with_structured_output(Finding).invoke("a")
    except ContextBudgetError as error:
        return error.needed_tokens - error.limit_tokens + len(error.limit_name)
    except ContextOverflowError:
        return 0
    except TruncatedAnswerError as error:
        return error.num_output_tokens
    except AnswerError as error:
        print(error.text, error.retryable)
    return None


# -- graphs and agents ---------------------------------------------------------------------------


def graphs(llm: ChatSwarmKV, text: str) -> dict[str, Any]:
    graph = SwarmStateGraph(SwarmState)
    graph.add_node("document", DocumentNode(llm))
    graph.add_node("risks", AnalystNode(llm, "Which clauses carry a risk?"))
    graph.add_node("finding", AnalystNode(llm, "What is due?", schema=Finding, output_key="due"))
    graph.add_edge(START, "document")
    graph.add_edge("document", "risks")
    graph.add_edge("document", "finding")
    check_budget(graph, document=text).raise_if_over()
    app = graph.compile(document=text)
    state: dict[str, Any] = app.invoke({"document": text})
    return state


def agents(llm: ChatSwarmKV) -> dict[str, Any]:
    middleware = SummarizationMiddleware(
        llm, trigger=("fraction", 0.7), token_counter=llm.get_num_tokens_from_messages
    )
    agent = create_agent(llm, [search], middleware=[middleware])
    state: dict[str, Any] = agent.invoke({"messages": [HumanMessage("a")]})
    return state
