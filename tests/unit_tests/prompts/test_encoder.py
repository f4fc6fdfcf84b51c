"""Whole prompts: one start token, shared prefixes that hold for every continuation, slices."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from langchain_swarmkv.engine.fake import BOS_ID, END_ID, START_ID, FakeTokenizer
from langchain_swarmkv.errors import ChatTemplateError, InvalidRequestError, PromptError
from langchain_swarmkv.prompts.document import document_message
from langchain_swarmkv.prompts.encoder import PromptEncoder, Thinking, watermark_slice
from tests.unit_tests.prompts.vocabularies import MergingTokenizer, encode_rendered

FOLDING = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
WITH_BOS = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
TALK: list[BaseMessage] = [SystemMessage("sys"), HumanMessage("hi")]

SEAMS = ["pre", "\n", " ", "2024-0", "<", "don", ".", "中", "e", "\n\n", "x"]
SUFFIXES = ["fix", "\nQ:", "question", "1", "|im", "'t", "\n\n", "文", " q", ""]


@pytest.mark.parametrize("template", [None, WITH_BOS])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_there_is_exactly_one_start_token(template: str | None, adds_bos: bool) -> None:
    """At position 0, whether the template writes it or the vocabulary asks for it, or both."""
    tokenizer = FakeTokenizer(adds_bos=adds_bos)
    encoder = PromptEncoder(tokenizer, chat_template=template)
    is_expected = adds_bos or template is not None
    second_turn = [*TALK, AIMessage("hello"), HumanMessage("again")]
    for ids in (encoder.encode(TALK), encoder.encode(second_turn), encoder.shared_prefix(TALK[:1])):
        assert ids.count(BOS_ID) == is_expected
        assert (ids[0] == BOS_ID) == is_expected


def test_a_branch_has_no_start_token_of_its_own() -> None:
    """What a branch adds to the shared prefix contains no second start."""
    encoder = PromptEncoder(FakeTokenizer(adds_bos=True), chat_template=None)
    prefix = encoder.shared_prefix(TALK[:1])
    assert BOS_ID not in encoder.encode(TALK)[len(prefix) :]


def test_no_end_token_is_added() -> None:
    """A prompt ends where the answer begins."""
    tokenizer = FakeTokenizer(adds_bos=True)
    ids = PromptEncoder(tokenizer).encode(TALK)
    assert ids[-1] != END_ID
    assert ids.count(END_ID) == 2
    assert ids.count(START_ID) == 3


def test_a_start_token_in_content_does_not_count() -> None:
    """Text that reads like the start token neither replaces it nor adds one."""
    tokenizer = FakeTokenizer(adds_bos=True)
    ids = PromptEncoder(tokenizer, chat_template="{{ messages[0].content }}").encode(
        [HumanMessage("<|bos|>x")]
    )
    assert ids == [BOS_ID, *b"<|bos|>x"]


def test_an_empty_conversation_is_refused() -> None:
    """Prompts, prefixes and slices need a message."""
    encoder = PromptEncoder(FakeTokenizer())
    for encode in (encoder.encode, encoder.shared_prefix):
        with pytest.raises(PromptError, match="no messages"):
            encode([])


@pytest.mark.parametrize("template", [None, FOLDING, "plain"])
@pytest.mark.parametrize("ending", SEAMS)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_no_merge_at_the_seam_moves_a_shared_token(
    template: str | None, ending: str, suffix: str
) -> None:
    """The prefix of a document is a prefix of every prompt about it, and a whole one at that."""
    tokenizer = MergingTokenizer(
        chat_template=None if template == "plain" else FakeTokenizer().chat_template
    )
    encoder = PromptEncoder(tokenizer, chat_template=None if template == "plain" else template)
    document = SystemMessage(f"The document {ending}")
    prefix = encoder.shared_prefix([document])
    whole = encoder.encode([document, HumanMessage(suffix)])
    assert whole[: len(prefix)] == prefix
    assert "The document" in tokenizer.decode(prefix)


@settings(max_examples=150, deadline=None)
@given(
    document=st.lists(st.sampled_from([*SEAMS, "word "]), min_size=1, max_size=6).map("".join),
    turn=st.text(max_size=8) | st.sampled_from(SUFFIXES),
    template=st.sampled_from([None, FOLDING]),
)
def test_every_continuation_begins_with_the_shared_prefix(
    document: str, turn: str, template: str | None
) -> None:
    """The prefix holds for user turns that were not among the probes."""
    turn = turn.encode("utf-8", "replace").decode()
    encoder = PromptEncoder(MergingTokenizer(), chat_template=template)
    shared = [document_message(document)]
    prefix = encoder.shared_prefix(shared)
    assert encoder.encode([*shared, HumanMessage(turn)])[: len(prefix)] == prefix


def test_the_whole_prompt_is_the_plain_tokenisation() -> None:
    """Merges over the seam between template and content are those of the whole text."""
    tokenizer = MergingTokenizer()
    ids = PromptEncoder(tokenizer).encode([SystemMessage("\nQ:"), HumanMessage("fix")])
    rendered = (
        "<|im_start|>system\n\nQ:<|im_end|>\n<|im_start|>user\nfix<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert ids == encode_rendered(tokenizer, rendered)


def test_a_prefix_of_chatml_reaches_into_the_next_turn() -> None:
    """All that is certain is shared: the document's end marker and the next turn's opening."""
    tokenizer = FakeTokenizer()
    prefix = PromptEncoder(tokenizer).shared_prefix([SystemMessage("doc")])
    assert tokenizer.readable(prefix) == "<|im_start|>system\ndoc<|im_end|>\n<|im_start|>"


NEXT: dict[str, list[BaseMessage]] = {
    "none": [],
    "user": [HumanMessage("Why?")],
    "system": [SystemMessage("Be brief."), HumanMessage("Why?")],
    "assistant": [AIMessage("So."), HumanMessage("Why?")],
    "tool": [ToolMessage("42", tool_call_id="1"), HumanMessage("Why?")],
}
ONE_SYSTEM_TURN = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('one system turn, first') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("role", NEXT)
@pytest.mark.parametrize(
    ("template", "num_shared"),
    [(t, n) for t in (None, "plain", FOLDING) for n in (1, 2)] + [(ONE_SYSTEM_TURN, 1)],
)
def test_a_prefix_holds_whatever_role_comes_next(
    template: str | None, role: str, num_shared: int
) -> None:
    """Models that cannot be cut share all of it or nothing."""
    source = None if template == "plain" else FakeTokenizer().chat_template
    tokenizer = MergingTokenizer(chat_template=source)
    encoder = PromptEncoder(tokenizer, chat_template=None if template == "plain" else template)
    shared = [SystemMessage("The document.\n"), HumanMessage("hi")][:num_shared]
    prefix = encoder.shared_prefix(shared)
    assert "The document" in tokenizer.decode(prefix)
    for text in ("Be brief.", "question", "fix", "\n\n", "中文"):
        tail = [message.model_copy(update={"content": text}) for message in NEXT[role]]
        whole = encoder.encode([*shared, *tail])
        assert whole[: len(prefix)] == prefix


def test_a_role_that_moves_the_document_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Once; the prefix is for the others."""
    moving = (
        "{% for m in messages if m.role == 'system' %}"
        "[{{ '1.' if loop.length > 1 and loop.first }}{{ m.content }}]{% endfor %}"
        "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    tokenizer = FakeTokenizer()
    encoder = PromptEncoder(tokenizer, chat_template=moving)
    for _ in range(2):
        assert tokenizer.readable(encoder.shared_prefix(TALK[:1])) == "[sys]"
    (record,) = caplog.records
    assert "role 'system'" in record.getMessage()
    assert "share 1 of 5 " in record.getMessage()


def test_a_folded_document_is_shared() -> None:
    """Without a system role the document opens the user turn, and is still a prefix."""
    tokenizer = FakeTokenizer()
    encoder = PromptEncoder(tokenizer, chat_template=FOLDING)
    prefix = encoder.shared_prefix([SystemMessage("doc")])
    assert tokenizer.readable(prefix) == "<|bos|>[INST] doc"


def test_a_prefix_may_end_with_any_turn() -> None:
    """A conversation may be shared too; it may be asked as it is, or go on with either role."""
    tokenizer = FakeTokenizer()
    encoder = PromptEncoder(tokenizer)
    shared = [*TALK, AIMessage("hello"), HumanMessage("again")]
    prefix = encoder.shared_prefix(shared)
    assert tokenizer.readable(prefix).endswith("<|im_start|>user\nagain<|im_end|>\n<|im_start|>")
    for tail in ([], [AIMessage("a")], [HumanMessage("b")]):
        assert encoder.encode([*shared, *tail])[: len(prefix)] == prefix


def test_a_system_text_that_would_move_is_folded_and_shared() -> None:
    """Some templates print the system text before the last user turn, wherever that is."""
    tokenizer = FakeTokenizer()
    moving = (
        "{% set last = messages | selectattr('role', 'equalto', 'user') | list | last %}"
        "{% for m in messages if m.role != 'system' %}{{ '[' + m.role + ']' }}"
        "{% if m == last and messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    encoder = PromptEncoder(tokenizer, chat_template=moving)
    assert tokenizer.readable(encoder.shared_prefix(TALK[:1])) == "[user]sys"
    prefix = encoder.shared_prefix(TALK)
    later = encoder.encode([*TALK, AIMessage("hello"), HumanMessage("again")])
    assert later[: len(prefix)] == prefix
    assert tokenizer.readable(prefix) == "[user]sys\n\nhi"


def test_a_template_that_shares_nothing_is_refused() -> None:
    """If what is told of the user's words comes first there is no prefix to prefill."""
    encoder = PromptEncoder(
        FakeTokenizer(),
        chat_template="{{ messages[-1].content | length }}"
        "{% for m in messages %}:{{ m.content }}{% endfor %}",
    )
    with pytest.raises(ChatTemplateError, match="shares nothing"):
        encoder.shared_prefix([SystemMessage("doc")])


def test_a_template_that_refuses_every_continuation_is_refused() -> None:
    """The template's own reason is told."""
    encoder = PromptEncoder(FakeTokenizer(), chat_template="{{ raise_exception('no') }}")
    with pytest.raises(ChatTemplateError, match="no"):
        encoder.shared_prefix([SystemMessage("doc")])


def test_a_slice_takes_the_first_tokens_and_all_the_rest() -> None:
    """`prefix[:k]` and then what follows the prefix."""
    assert watermark_slice([1, 2, 3], [8, 9], 2) == [1, 2, 8, 9]
    assert watermark_slice([1, 2, 3], [8, 9], 3) == [1, 2, 3, 8, 9]


@pytest.mark.parametrize("num_tokens", [0, -1, 4])
def test_a_slice_beyond_the_prefix_is_refused(num_tokens: int) -> None:
    """The error tells what was asked and what there is."""
    with pytest.raises(InvalidRequestError, match="1 to 3") as error:
        watermark_slice([1, 2, 3], [8], num_tokens)
    assert error.value.facts == {"required_prefix_tokens": num_tokens, "num_prefix_tokens": 3}


def test_a_sliced_prompt_is_well_formed() -> None:
    """The document is cut; the end of its turn and the whole task stay."""
    tokenizer = FakeTokenizer()
    encoder = PromptEncoder(tokenizer)
    messages = [SystemMessage("0123456789\n"), HumanMessage("task")]
    num_tokens = len("?system\n01234")
    assert tokenizer.readable(encoder.prompt_slice(messages, num_tokens).ids) == (
        "<|im_start|>system\n01234\n<|im_end|>\n<|im_start|>user\ntask<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_sliced_prompt_may_be_folded() -> None:
    """Where the document is folded into the user turn, the blank line before the task stays."""
    tokenizer = FakeTokenizer(adds_bos=True)
    encoder = PromptEncoder(tokenizer, chat_template=FOLDING)
    messages = [SystemMessage("0123456789"), HumanMessage("task")]
    num_tokens = 1 + len("[INST] 012")
    assert tokenizer.readable(encoder.prompt_slice(messages, num_tokens).ids) == (
        "<|bos|>[INST] 012\n\ntask [/INST]"
    )


def test_every_slice_is_the_prefix_and_the_task() -> None:
    """For each k, k tokens of the prefix; from the document's end on it is the whole prompt."""
    tokenizer = MergingTokenizer()
    encoder = PromptEncoder(tokenizer)
    messages = [document_message("A prefix.\n\nIn 2024-01 don't", "Read."), HumanMessage("fix")]
    prefix = encoder.shared_prefix(messages[:1])
    whole = encoder.encode(messages)
    for num_tokens in range(1, len(prefix) + 1):
        ids = encoder.prompt_slice(messages, num_tokens).ids
        assert ids[:num_tokens] == prefix[:num_tokens]
        assert ids == whole or ids[num_tokens:] == whole[len(whole) - len(ids) + num_tokens :]
        assert ids.count(END_ID) == 2
        assert len(ids) <= len(whole)
    assert encoder.prompt_slice(messages, len(prefix)).ids == whole


@pytest.mark.parametrize("num_tokens", [0, 10_000, 1.5, "1"])
def test_a_sliced_prompt_checks_its_bounds(num_tokens: Any) -> None:
    """Asking for more than the shared prefix holds is an error with the numbers."""
    encoder = PromptEncoder(FakeTokenizer())
    with pytest.raises(InvalidRequestError, match="required_prefix_tokens"):
        encoder.prompt_slice(TALK, num_tokens)


def test_a_slice_needs_a_document() -> None:
    """Without a system message there is nothing to take a part of."""
    with pytest.raises(InvalidRequestError, match="first message must be a system message"):
        PromptEncoder(FakeTokenizer()).prompt_slice([HumanMessage("hi")], 1)


@pytest.mark.parametrize("opens", [True, False])
def test_only_the_template_says_whether_an_answer_begins_with_thoughts(opens: bool) -> None:
    """Not the text of a message that ends as such a prompt does."""
    template = (
        "{# <think></think> #}{% for m in messages %}{{ m.role + ': ' + m.content }}\n{% endfor %}"
        + ("<think>\n" if opens else "")
    )
    encoder = PromptEncoder(FakeTokenizer(), chat_template=template)
    expected = Thinking.BEGUN if opens else Thinking.FREE
    for text in ("Hi", "What is <think>", "Or </think>", "<think>x</think>"):
        prompt = encoder.prompt([HumanMessage(text)])
        assert prompt.thinking is expected
        assert text in FakeTokenizer().decode(prompt.ids)
