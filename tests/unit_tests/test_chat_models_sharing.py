"""One engine for all who want the same: copies, pickles, closing, and documents kept in it."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField

from langchain_swarmkv.chat_models import ChatSwarmKV
from langchain_swarmkv.engine.fake import FakeEngine
from langchain_swarmkv.errors import (
    ChatTemplateError,
    ConfigurationError,
    ContextBudgetError,
    EngineClosedError,
    PromptError,
)
from langchain_swarmkv.graph.analyst_node import AnalystNode
from langchain_swarmkv.graph.document_node import DocumentNode
from langchain_swarmkv.prompts import session
from langchain_swarmkv.prompts.document import document_message
from langchain_swarmkv.scheduling.request import PrefillProgress
from langchain_swarmkv.scheduling.swarm_engine import SwarmEngine
from langchain_swarmkv.statistics import RequestStatistics
from tests.support.decode_spy import DecodeSpy
from tests.unit_tests.chat_support import FakeModelFiles, chat, eventually, fake_model_files

TALK = [SystemMessage("Be brief."), HumanMessage("Hello")]
DOCUMENT = document_message("A document. " * 20, "Read.")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeModelFiles:
    return fake_model_files(tmp_path, monkeypatch)


@pytest.fixture
def llm(files: FakeModelFiles) -> Iterator[ChatSwarmKV]:
    with ChatSwarmKV(model_path=files.path(), max_tokens=20) as llm:
        yield llm


def is_closed(engine: FakeEngine) -> bool:
    return engine._closed


# -- loading -------------------------------------------------------------------------------------


def test_counting_loads_no_weights(files: FakeModelFiles, llm: ChatSwarmKV) -> None:
    """Counts, prompts and prefixes need the vocabulary alone, which is opened once."""
    assert llm.get_num_tokens("abc") == 3
    assert llm.get_num_tokens_from_messages(TALK) == len(llm.prompt_token_ids(TALK))
    assert llm.prefix_token_ids(TALK[:1])
    assert llm.document_of(_ref("unknown")) is None
    assert not llm.release(_ref("unknown"))
    assert (len(files.engines), files.num_tokenizers) == (0, 1)


def _ref(digest: str) -> Any:
    return {
        "digest": digest,
        "num_tokens": 1,
        "model": "",
        "text_key": "document",
        "instructions": "",
    }


def test_prompts_are_checked_before_anything_is_loaded(
    files: FakeModelFiles, llm: ChatSwarmKV
) -> None:
    """A prompt that cannot be made costs no model."""
    with pytest.raises(PromptError):
        llm.invoke([])
    with pytest.raises(ConfigurationError):
        llm.invoke(TALK, temprature=1)
    refusing = llm.model_copy(update={"chat_template": "{{ raise_exception('no') }}"})
    with pytest.raises(ChatTemplateError):
        refusing.invoke(TALK)
    assert files.engines == []


def test_many_first_callers_load_once(files: FakeModelFiles) -> None:
    """Eight objects in eight threads, cold."""
    llms = [ChatSwarmKV(model_path=files.path(), max_tokens=5) for _ in range(8)]
    start = threading.Barrier(8)

    def ask(llm: ChatSwarmKV) -> Any:
        start.wait()
        return llm.invoke(TALK).content

    with ThreadPoolExecutor(8) as pool:
        answers = set(pool.map(ask, llms))
    assert (len(answers), len(files.engines)) == (1, 1)
    for llm in llms:
        llm.close()
    assert is_closed(files.engines[0])


def test_other_settings_are_another_engine(files: FakeModelFiles, llm: ChatSwarmKV) -> None:
    """What llama.cpp would build differently is not shared; how tokens are picked is no matter."""
    llm.invoke(TALK)
    with ChatSwarmKV(model_path=llm.model_path, temperature=1.0, cache_salt="x") as warm:
        warm.invoke(TALK)
    assert len(files.engines) == 1
    with ChatSwarmKV(model_path=llm.model_path, n_ctx=1000) as other:
        other.invoke(TALK)
        assert len(files.engines) == 2
    assert [is_closed(engine) for engine in files.engines] == [False, True]


# -- copies --------------------------------------------------------------------------------------

COPIES: list[Callable[[ChatSwarmKV], Any]] = [
    copy.copy,
    copy.deepcopy,
    lambda llm: llm.model_copy(),
    lambda llm: llm.model_copy(deep=True),
    lambda llm: llm.model_copy(update={"max_tokens": 20}),
    lambda llm: llm.bind(max_tokens=20),
    lambda llm: llm.with_config({"tags": ["x"]}),
    lambda llm: copy.deepcopy(llm.bind(max_tokens=20)),
]


@pytest.mark.parametrize("make_copy", COPIES)
@pytest.mark.parametrize("is_warm", [True, False])
def test_copies_share_one_engine(
    files: FakeModelFiles, llm: ChatSwarmKV, make_copy: Callable[[ChatSwarmKV], Any], is_warm: bool
) -> None:
    """Made before the first call or after it; the model is never loaded twice."""
    if is_warm:
        llm.invoke(TALK)
    other = make_copy(llm)
    assert other.invoke(TALK).content == llm.invoke(TALK).content
    assert len(files.engines) == 1


@pytest.mark.parametrize("make_copy", COPIES[:5])
def test_a_copy_keeps_the_engine_that_the_original_gives_back(
    files: FakeModelFiles, llm: ChatSwarmKV, make_copy: Callable[[ChatSwarmKV], ChatSwarmKV]
) -> None:
    """The last one closes it, whichever that is."""
    llm.invoke(TALK)
    other = make_copy(llm)
    llm.close()
    assert not is_closed(files.engines[0])
    assert other.invoke(TALK).usage_metadata["input_token_details"]["cache_read"] > 0  # type: ignore[index]
    with pytest.raises(EngineClosedError):
        llm.invoke(TALK)
    other.close()
    assert is_closed(files.engines[0])
    assert len(files.engines) == 1


def test_a_copy_with_other_engine_settings_gets_its_own(
    files: FakeModelFiles, llm: ChatSwarmKV
) -> None:
    """`model_copy(update=...)` with a smaller context does not answer from the larger one."""
    llm.invoke(TALK)
    small = llm.model_copy(update={"n_ctx": 60})
    with pytest.raises(ContextBudgetError):
        small.invoke("x" * 60)
    assert len(files.engines) == 2
    small.close()
    assert [is_closed(engine) for engine in files.engines] == [False, True]
    assert llm.invoke(TALK).content


def test_engine_settings_of_an_object_cannot_change(llm: ChatSwarmKV) -> None:
    """Silently ignoring the change would be worse; how tokens are picked may change."""
    llm.max_tokens = 3
    assert len(llm.invoke(TALK).content) == 3
    for name, value in (("n_ctx", 60), ("engine", None), ("model_path", Path("other.gguf"))):
        with pytest.raises(ConfigurationError, match=name):
            setattr(llm, name, value)
    with pytest.raises(ConfigurationError, match="n_ctx"):
        llm.model_copy(update={"n_ctx": 0})


def test_copies_of_a_model_with_an_engine_share_it() -> None:
    """The engine object is never copied, and closing a model leaves it to its owner."""
    with SwarmEngine(FakeEngine()) as engine:
        llm = chat(engine, max_tokens=20)
        for make_copy in COPIES:
            other = make_copy(llm)
            assert other.invoke(TALK).content == llm.invoke(TALK).content
        assert copy.deepcopy(llm).engine is engine
        llm.close()
        assert not engine.closed
        assert engine.statistics().num_finished == 2 * len(COPIES)


def test_configurable_models_load_once(files: FakeModelFiles, llm: ChatSwarmKV) -> None:
    """LangChain makes a new object for each call of one; the engine outlives them."""
    configurable = llm.configurable_fields(max_tokens=ConfigurableField(id="length"))
    for length in (3, 5, 7):
        answer = configurable.invoke(TALK, {"configurable": {"length": length}})
        assert len(answer.content) == length
        gc.collect()
    assert len(files.engines) == 1
    llm.close()
    eventually(lambda: is_closed(files.engines[0]))


def test_models_with_an_engine_are_configurable_too() -> None:
    """All fields are handed over, the engine among them."""
    with SwarmEngine(FakeEngine()) as engine:
        configurable = chat(engine).configurable_fields(max_tokens=ConfigurableField(id="length"))
        answer = configurable.invoke(TALK, {"configurable": {"length": 3}})
        assert len(answer.content) == 3


# -- pickle --------------------------------------------------------------------------------------


def test_a_pickled_model_opens_its_file_again(files: FakeModelFiles, llm: ChatSwarmKV) -> None:
    """By path, with all its settings; in one process that is the engine that is there already."""
    llm.invoke(TALK)
    restored = pickle.loads(pickle.dumps(llm.model_copy(update={"seed": 7})))
    assert isinstance(restored, ChatSwarmKV)
    assert (restored.model_path, restored.seed, restored.max_tokens) == (llm.model_path, 7, 20)
    assert restored.invoke(TALK).content == llm.invoke(TALK).content
    assert len(files.engines) == 1
    restored.close()
    assert not is_closed(files.engines[0])


def test_a_model_with_an_engine_refuses_to_be_pickled() -> None:
    """Native state does not travel; the error says what does."""
    with (
        SwarmEngine(FakeEngine()) as engine,
        pytest.raises(ConfigurationError, match="Give model_path"),
    ):
        pickle.dumps(chat(engine))


# -- closing -------------------------------------------------------------------------------------


def test_closing_gives_the_engine_back(files: FakeModelFiles) -> None:
    """By `close`, twice without harm, or as a context manager; then calls are refused."""
    with ChatSwarmKV(model_path=files.path(), max_tokens=5) as llm:
        llm.invoke(TALK)
        assert not is_closed(files.engines[0])
    assert is_closed(files.engines[0])
    llm.close()
    for call in (llm.invoke, llm.prefill, lambda _: llm.engine_statistics()):
        with pytest.raises(EngineClosedError, match="closed"):
            call(TALK)
    assert llm.get_num_tokens("still counts") == 12


def test_closing_what_was_never_used_loads_nothing(files: FakeModelFiles) -> None:
    """There is nothing to give back."""
    ChatSwarmKV(model_path=files.path()).close()
    assert files.engines == []


def test_garbage_gives_the_engine_back(files: FakeModelFiles) -> None:
    """A model that nobody holds any more does not keep its weights in memory."""
    llm = ChatSwarmKV(model_path=files.path(), max_tokens=5)
    llm.invoke(TALK)
    cycle: dict[str, Any] = {"llm": llm}
    cycle["self"] = cycle
    del llm, cycle
    gc.collect()
    eventually(lambda: is_closed(files.engines[0]))


def test_a_new_model_after_the_last_loads_again(files: FakeModelFiles) -> None:
    """Closed engines do not come back."""
    for count in (1, 2):
        with ChatSwarmKV(model_path=files.path(), max_tokens=5) as llm:
            llm.invoke(TALK)
        assert len(files.engines) == count


# -- documents -----------------------------------------------------------------------------------


def test_prefill_returns_a_plain_reference(llm: ChatSwarmKV) -> None:
    """JSON data: digest, length, model identity, and where text and instructions are found."""
    ref = llm.prefill([DOCUMENT])
    assert json.loads(json.dumps(ref)) == ref
    assert set(ref) == {"digest", "num_tokens", "model", "text_key", "instructions"}
    assert ref["num_tokens"] == len(llm.prefix_token_ids([DOCUMENT]))
    assert len(ref["digest"]) == 64
    assert ref["instructions"] == "Read."


def test_prefilling_again_computes_nothing(files: FakeModelFiles, llm: ChatSwarmKV) -> None:
    """The same messages give the same reference, from the cache."""
    ref = llm.prefill([DOCUMENT])
    num_decoded = files.engines[0].decoded_tokens
    assert num_decoded == ref["num_tokens"]
    assert llm.prefill([DOCUMENT]) == ref
    assert files.engines[0].decoded_tokens == num_decoded
    assert llm.engine_statistics().num_pinned_prefixes == 1


def test_a_pinned_document_stays_until_it_is_released(llm: ChatSwarmKV) -> None:
    """Releasing tells whether there was something to release, and harms nothing twice."""
    ref = llm.prefill([DOCUMENT])
    assert llm.engine_statistics().cells_pinned == ref["num_tokens"]
    assert llm.release(ref)
    assert not llm.release(ref)
    assert llm.engine_statistics().cells_pinned == 0
    unpinned = llm.prefill([DOCUMENT], pin=False)
    assert unpinned == ref
    assert llm.engine_statistics().num_pinned_prefixes == 0


def test_references_differ_by_salt_and_text(llm: ChatSwarmKV) -> None:
    """What must not be mixed has another digest."""
    salted = llm.model_copy(update={"cache_salt": "tenant"})
    refs = [
        llm.prefill([DOCUMENT]),
        salted.prefill([DOCUMENT]),
        llm.prefill([document_message("Another.", "Read.")]),
        llm.prefill([document_message("A document. " * 20, "Write.")]),
    ]
    assert len({ref["digest"] for ref in refs}) == 4
    assert "tenant" not in json.dumps(refs)


async def test_prefill_is_the_same_async(files: FakeModelFiles, llm: ChatSwarmKV) -> None:
    """One reference, computed once; many at a time as well."""
    refs = await asyncio.gather(*(llm.aprefill([DOCUMENT]) for _ in range(5)))
    assert all(ref == refs[0] for ref in refs)
    assert llm.prefill([DOCUMENT]) == refs[0]
    assert files.engines[0].decoded_tokens == refs[0]["num_tokens"]


def test_the_text_of_a_document_is_given_back(llm: ChatSwarmKV) -> None:
    """By this object and its copies, while one of them lives; other objects do not know it."""
    other = llm.model_copy()
    ref = llm.prefill([DOCUMENT], pin=False)
    assert llm.document_of(ref) == other.document_of(ref) == "A document. " * 20
    assert llm.bind(seed=1).bound.document_of(ref) == "A document. " * 20  # type: ignore[attr-defined]
    with ChatSwarmKV(model_path=llm.model_path) as stranger:
        assert stranger.document_of(ref) is None


def test_only_the_latest_documents_are_kept(
    llm: ChatSwarmKV, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that reads documents for ever does not fill its memory with them."""
    monkeypatch.setattr(session, "MAX_DOCUMENTS", 2)
    refs = [llm.prefill([document_message(f"Number {i}.")], pin=False) for i in range(3)]
    assert [llm.document_of(ref) for ref in refs] == [None, "Number 1.", "Number 2."]


def test_progress_is_told_to_the_end(files: FakeModelFiles, llm: ChatSwarmKV) -> None:
    """The last call says that all of it is there, computed or cached."""
    files.options = {"max_batch_tokens": 64}
    told: list[PrefillProgress] = []
    ref = llm.prefill([DOCUMENT], on_progress=told.append)
    assert told[-1] == PrefillProgress(ref["num_tokens"], 0, ref["num_tokens"])
    assert [p.num_computed_tokens for p in told] == sorted({p.num_computed_tokens for p in told})
    told.clear()
    llm.prefill([DOCUMENT], on_progress=told.append)
    assert told[-1].num_cached_tokens + told[-1].num_computed_tokens == ref["num_tokens"]
    assert told[-1].num_computed_tokens == 0


async def test_the_numbers_of_a_prefill_are_told_at_its_end(llm: ChatSwarmKV) -> None:
    """Once, with what was computed and what was there; sync and async."""
    told: list[RequestStatistics] = []
    ref = llm.prefill([DOCUMENT], on_finish=told.append)
    await llm.aprefill([DOCUMENT], on_finish=told.append)
    num_tokens = ref["num_tokens"]
    assert [seen.num_prompt_tokens for seen in told] == [num_tokens, num_tokens]
    assert [seen.num_computed_tokens for seen in told] == [num_tokens, 0]
    assert all(seen.finished_at is not None for seen in told)


def test_a_document_longer_than_the_context_is_refused(llm: ChatSwarmKV) -> None:
    """Before anything is decoded, and nothing of it is remembered."""
    with pytest.raises(ContextOverflowError) as told:
        llm.prefill([document_message("x" * 10_000)])
    assert isinstance(told.value, ContextBudgetError)
    assert llm.engine_statistics().num_steps == 0


# -- models that cannot be cut -------------------------------------------------------------------

uncuttable = pytest.mark.parametrize("architecture", ["gemma3", "mamba", "jamba"])
LONG = SystemMessage("The lamp has a hinge of brass. " * 12)


@uncuttable
@pytest.mark.parametrize(
    "tail",
    [
        [HumanMessage("Why?")],
        [SystemMessage("Be brief."), HumanMessage("Why?")],
        [ToolMessage("42", tool_call_id="1"), HumanMessage("Why?")],
        [],
    ],
    ids=["user", "system", "tool", "none"],
)
def test_what_follows_a_document_shares_all_of_it(
    architecture: str, tail: list[BaseMessage], tiny_gguf: Callable[..., Path], spy: DecodeSpy
) -> None:
    """A model that cannot be cut forks at the end of the prefill, whatever role comes next."""
    with ChatSwarmKV(model_path=tiny_gguf(architecture), n_ctx=2048, max_tokens=1) as llm:
        ref = llm.prefill([LONG])
        assert ref["num_tokens"] > 300
        spy.reset()
        usage = llm.invoke([LONG, *tail]).usage_metadata
        assert usage is not None
        assert usage["input_token_details"]["cache_read"] == ref["num_tokens"]
        assert spy.num_tokens == usage["input_tokens"] - ref["num_tokens"]


@uncuttable
def test_a_task_with_a_system_text_shares_the_document(
    architecture: str, tiny_gguf: Callable[..., Path], spy: DecodeSpy
) -> None:
    """Each analyst computes its task alone."""
    task = ChatPromptTemplate.from_messages([("system", "Be brief."), ("human", "Why?")])
    with ChatSwarmKV(model_path=tiny_gguf(architecture), n_ctx=2048, max_tokens=1) as llm:
        state: dict[str, Any] = {"document": "The lamp has a hinge of brass. " * 12}
        state |= DocumentNode(llm).invoke(state)
        num_tokens = state["document_ref"]["num_tokens"]
        for _ in range(2):
            spy.reset()
            AnalystNode(llm, task).invoke(state)
            assert 0 < spy.num_tokens < num_tokens // 3


# -- settings that look alike --------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"a": [x]}], ids=["plain", "nested"])
def test_template_variables_that_python_calls_equal_are_told_apart(
    llm: ChatSwarmKV, wrap: Callable[[object], object]
) -> None:
    """1, True and 1.0 are printed differently, and so are 0.0 and -0.0."""
    printed = []
    for value in (1, True, 1.0, "1", 0.0, -0.0, False, 0, None):
        template = "{{ x }} {{ messages[0].content }}"
        update = {"chat_template": template, "chat_template_kwargs": {"x": wrap(value)}}
        copied = llm.model_copy(update=update)
        assert copied._encoder is copied._encoder
        printed.append(llm.tokenizer.decode(copied.prompt_token_ids("hi")).removesuffix(" hi"))
    wanted = [str(wrap(value)) for value in (1, True, 1.0, "1", 0.0, -0.0, False, 0, None)]
    assert printed == wanted


def test_a_salt_of_bytes_is_refused(files: FakeModelFiles, llm: ChatSwarmKV) -> None:
    """Wherever it is given: it would be the salt of the text that the bytes spell."""
    with pytest.raises(ValueError, match=r"cache_salt is a bytes; give a string \(salt.hex\(\)"):
        ChatSwarmKV(model_path=files.path(), cache_salt=b"x")
    with pytest.raises(ConfigurationError, match="cache_salt is a bytes"):
        llm.model_copy(update={"cache_salt": b"x"})
    with pytest.raises(ConfigurationError, match="cache_salt is a bytes"):
        llm.cache_salt = b"x"  # type: ignore[assignment]
    assert llm.cache_salt == ""
