"""No prompt without the text of every message: typed content, dropped, cut and moved texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel

from langchain_swarmkv.engine.fake import FakeTokenizer
from langchain_swarmkv.engine.llama_tokenizer import LlamaTokenizer
from langchain_swarmkv.errors import ChatTemplateError
from langchain_swarmkv.graph.budget import check_budget
from langchain_swarmkv.prompts.document import document_message
from langchain_swarmkv.prompts.encoder import Ask, PromptEncoder
from langchain_swarmkv.prompts.messages import template_messages
from langchain_swarmkv.prompts.template import ChatTemplate
from tests.support.tiny_gguf import write_tiny_gguf
from tests.unit_tests.graph.support import fake_llm, fan_out
from tests.unit_tests.prompts.call_templates import TEMPLATES, model

TEXT = 'He said: "é & <b>"\n\n\tand 海豹. '
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
# As SmolVLM and Idefics3 do: the text is looked for in blocks, and a string has none.
TYPED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role }}"
    "{% if m.content[0].type == 'image' %}:{% else %}: {% endif %}"
    "{% for line in m.content %}{% if line.type == 'text' %}{{ line.text }}"
    "{% elif line.type == 'image' %}<image>{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)
# As Llama-Guard-3 does: no system role, strict alternation, and trimmed.
TYPED_GUARD = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% for c in m.content %}{% if c.type == 'text' %}"
    "{{ m.role + ': ' + c.text | trim + '\n\n' }}{% endif %}{% endfor %}{% endfor %}"
)
# Blocks for the user alone; the other roles would be printed as they are.
TYPED_USER = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role != 'user' %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{{ c.text }}{% endfor %}{% endif %}{% endfor %}"
)
TALK = [
    SystemMessage(f"sys {TEXT}"),
    HumanMessage(f"ask {TEXT}"),
    AIMessage(f"answer {TEXT}"),
    HumanMessage(f"again {TEXT}"),
]


def render(source: str, messages: Sequence[BaseMessage], **variables: object) -> str:
    return ChatTemplate(source, FakeTokenizer(), variables).render(template_messages(messages))


def in_order(prompt: str, messages: Sequence[BaseMessage]) -> bool:
    at = [prompt.find(str(m.content).strip()) for m in messages]
    return -1 not in at and at == sorted(at)


# -- typed content -------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [TYPED, TYPED_GUARD, TYPED_USER])
def test_a_template_that_reads_blocks_gets_blocks(source: str) -> None:
    """Every text is there, as text."""
    prompt = render(source, TALK)
    assert in_order(prompt, TALK)
    assert "'type'" not in prompt


def test_a_template_that_reads_both_gets_text() -> None:
    """Blocks are for those that need them."""
    source = PLAIN.replace("m.content", "m.content if m.content is string else 'blocks'")
    assert render(source, [HumanMessage("hi")]) == "[user]hi"


def test_a_printed_list_of_blocks_is_no_text() -> None:
    """Whatever Python would write for a list is not what the user said."""
    source = "{% for m in messages if m.content is not string %}{{ m.content }}{% endfor %}"
    with pytest.raises(ChatTemplateError, match=r"message 1 \(user\) out"):
        render(source, [HumanMessage("hi")])


def test_an_empty_text_is_an_empty_block() -> None:
    """Templates look at the first block of each message."""
    assert render(TYPED, [SystemMessage(""), HumanMessage("hi")]).count("<|im_start|>") == 3


def test_results_of_calls_can_be_blocks() -> None:
    """In a template with a way for calls that reads them so."""
    source = TEMPLATES["qwen2.5"].replace(
        "{{- message.content }}\n        {{- '\\n</tool_response>' }}",
        "{{- message.content[0].text }}\n        {{- '\\n</tool_response>' }}",
    )
    assert source != TEMPLATES["qwen2.5"]
    tokenizer = model("qwen2.5").tokenizer
    prompt = ChatTemplate(source, tokenizer).render(template_messages(with_calls("")), TOOLS)
    assert f"<tool_response>\nresult {TEXT}\n</tool_response>" in prompt
    assert '<tool_call>\n{"name": "search"' in prompt


class Finding(BaseModel):
    """A finding."""

    text: str


def test_whole_graphs_run_on_a_template_that_reads_blocks() -> None:
    """Budget, document, analysts, a plain call and a structured one: all see document and task."""
    seen: list[str] = []

    def reply(prompt: str) -> str:
        seen.append(prompt)
        return '{"text": "x"}'

    with fake_llm(chat_template=TYPED, reply=reply, num_cells=20_000, max_tokens=40) as llm:
        graph = fan_out(llm, ("claims",))
        (row,) = check_budget(graph, document="The seal swims.").rows
        assert row.document_tokens is not None
        assert row.document_tokens > len("The seal swims.")
        graph.compile().invoke({"document": "The seal swims."})
        messages = [document_message("The seal swims."), HumanMessage("Tell me about claims.")]
        llm.invoke(messages)
        llm.with_structured_output(Finding).invoke(messages)
    assert len(seen) == 3
    assert all("The seal swims." in prompt and "about claims." in prompt for prompt in seen)


# -- what a template may do to a text --------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        "m.content",
        "m.content | trim",
        "m.content | tojson",
        "m.content | tojson(ensure_ascii=true)",
        "m.content | e",
        "m.content.split('\\n') | join('\\n')",
        "'a' + m.content if m.content.startswith('sys') else m.content",
        "(m.content | length) ~ m.content",
    ],
)
def test_right_templates_are_not_refused(change: str) -> None:
    """Trimming, escaping, looking at a text: nothing is lost."""
    prompt = render(PLAIN.replace("m.content", change), TALK)
    assert prompt.count("[") == len(TALK)
    assert prompt.startswith("[system]")


@pytest.mark.parametrize(
    "change",
    [
        "''",
        "m.content[:20]",
        "m.content[2:]",
        "m.content.split('\\n')[0]",
        "m.content | replace('said', '')",
        "m.content | upper",
        "m.content ~ m.content",
        "messages[0].content",
        "m.content if m.role != 'assistant'",
        "m.content if not loop.first",
        "m.content if not loop.last",
        "m.content if not m.content.startswith('a')",
        "messages[loop.length - loop.index].content",
    ],
)
def test_what_loses_cuts_changes_moves_or_doubles_a_text_is_refused(change: str) -> None:
    """By name, whatever the role."""
    told = r"'fake' .*(out, or a part|another order, or twice)"
    with pytest.raises(ChatTemplateError, match=told):
        render(PLAIN.replace("m.content", change), TALK[1:])


def test_equal_texts_are_counted() -> None:
    """Each message must be there, though another says the same."""
    messages = [HumanMessage("a"), AIMessage("a"), HumanMessage("a")]
    assert render(PLAIN, messages) == "[user]a[assistant]a[user]a"
    with pytest.raises(ChatTemplateError):
        render(PLAIN.replace("messages %}", "messages[1:] %}"), messages)


def test_a_short_text_is_not_found_in_the_markup() -> None:
    """`user` stands in the prompt, but not as what the user said."""
    with pytest.raises(ChatTemplateError, match="message 1"):
        render("{% for m in messages %}[{{ m.role }}]{% endfor %}", [HumanMessage("user")])


def test_what_a_template_does_by_how_a_text_begins_is_seen() -> None:
    """The marks hide the beginning from it, so the prompt itself is looked at, too."""
    long_talk = [HumanMessage("See. " * 20)]
    doubled = "{{ m.content }}{% if m.content.startswith('See') %}{{ m.content }}{% endif %}"
    with pytest.raises(ChatTemplateError, match="text of message 1 twice"):
        render(PLAIN.replace("{{ m.content }}", doubled), long_talk)
    documents = (
        "{% for d in documents %}{% if not d.text.startswith('See') %}{{ d.text }}{% endif %}"
        "{% endfor %}"
    )
    told = render(documents + PLAIN, TALK[1:2], documents=[{"text": "Read this."}])
    assert told.startswith("Read this.")
    with pytest.raises(ChatTemplateError, match="document 1 out"):
        render(documents + PLAIN, TALK[1:2], documents=[{"text": "See this."}])


def test_earlier_thoughts_may_go() -> None:
    """They are no text of an answer."""
    thinking = AIMessage("<think>\nmuse\n</think>\n\nanswer")
    encoder = model("qwen3").encoder
    ids = encoder.encode([HumanMessage("hi"), thinking, HumanMessage("go on")])
    assert "muse" not in model("qwen3").tokenizer.readable(ids)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("Be brief. /no_think", "Be brief."),
        ("/no_think", None),
        ("/think Be brief.", "Be brief."),
        ("See /usr/think for /think and /no_think!", None),
    ],
)
def test_a_switch_is_no_text_but_a_word_of_the_document_is(text: str, kept: str | None) -> None:
    """SmolLM3 takes its switches out of the system text, and would out of a path, too."""
    encoder = model("smollm3").encoder
    prompt = model("smollm3").tokenizer.readable(
        encoder.encode([SystemMessage(text), HumanMessage("hi")])
    )
    if text.startswith("See"):
        assert f"<|im_start|>user\n{text}\n\nhi<|im_end|>" in prompt
    else:
        assert "Reasoning Mode: /no_think" in prompt or "/no_think" not in text
        assert f"## Custom Instructions\n\n{kept or 'You are'}" in prompt.replace("\n ", "\n")


# -- folding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["smollm3", "deepseek-r1-distill", "gpt-oss", "deepseek-v3.1"])
@pytest.mark.parametrize("num_leading", [1, 2])
def test_a_later_system_turn_leaves_the_leading_one_where_it_is(
    name: str, num_leading: int
) -> None:
    """The prefix is what it is without it, up to the second user turn."""
    leading = [SystemMessage("The document. " * 50), SystemMessage("Be brief.")][:num_leading]
    talk = [*leading, HumanMessage("one"), AIMessage("two")]
    late = [*talk, SystemMessage("Be kind."), HumanMessage("three")]
    encoder = model(name).encoder
    prefix = encoder.shared_prefix(leading)
    assert len(prefix) >= 50 * len("The document. ")
    assert encoder.encode(late)[: len(prefix)] == prefix
    before = encoder.encode([*talk, HumanMessage("")])
    shared = next(
        i for i, (a, b) in enumerate(zip(before, encoder.encode(late), strict=False)) if a != b
    )
    readable = model(name).tokenizer.readable
    assert "two" in readable(before[:shared])
    assert "Be kind.\n\nthree" in readable(encoder.encode(late))


def test_system_turns_that_a_template_takes_stay_apart() -> None:
    """Folding a later one merges no others."""
    source = (
        "{% for m in messages %}"
        "{% if m.role == 'system' and loop.index0 > 1 %}{{ raise_exception('late') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    talk = [SystemMessage("a"), SystemMessage("b"), HumanMessage("c"), HumanMessage("d")]
    late = [*talk, AIMessage("e"), SystemMessage("f"), HumanMessage("g")]
    assert render(source, late) == ("[system]a[system]b[user]c[user]d[assistant]e[user]f\n\ng")


# -- calls -----------------------------------------------------------------------------------------

SEARCH = convert_to_openai_tool(
    {
        "title": "search",
        "description": "Find pages.",
        "type": "object",
        "properties": {"query": {"type": "string"}},
    }
)
TOOLS = [SEARCH]


def with_calls(text: str, *, answered: bool = False) -> list[BaseMessage]:
    call = {"name": "search", "args": {"query": f"of {TEXT}", "n": 1.5}, "id": "call00001"}
    talk: list[BaseMessage] = [
        SystemMessage(f"sys {TEXT}"),
        HumanMessage(f"ask {TEXT}"),
        AIMessage(text, tool_calls=[call]),
        ToolMessage(f"result {TEXT}", tool_call_id="call00001", name="search"),
    ]
    return [*talk, AIMessage(f"answer {TEXT}"), HumanMessage("more")] if answered else talk


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("name", ["mistral-nemo", "mistral-small-3.2", "like-llama-3"])
def test_text_beside_a_call_is_kept(name: str, answered: bool) -> None:
    """In a turn of its own, the call in its native format behind it."""
    made = model(name)
    messages = with_calls(f"I look {TEXT}", answered=answered)
    prompt = made.tokenizer.readable(made.encoder.prompt(messages, Ask(tools=TOOLS)).ids)
    assert in_order(prompt, messages)
    assert "<tool_call>" not in prompt
    assert json.dumps(f"of {TEXT}", ensure_ascii=False) in prompt
    assert prompt.index("I look") < prompt.index("of He said") < prompt.index("result He")


@pytest.mark.parametrize("name", ["qwen2.5", "granite-4.0", "mistral-small-3.2"])
def test_a_call_without_text_is_written_as_it_was(name: str) -> None:
    """One turn, as the template has it."""
    made = model(name)
    prompt = made.tokenizer.readable(made.encoder.prompt(with_calls(""), Ask(tools=TOOLS)).ids)
    plain = template_messages(with_calls(""))
    assert made.encoder._template._for_tools._run(plain, {"tools": TOOLS}) == prompt


def test_a_template_that_drops_the_text_whatever_is_tried_is_refused() -> None:
    """Saying which message, and that it stands beside a call."""
    source = TEMPLATES["like-llama-3"].replace(
        "{% else %}{{ m.content }}", "{% elif m.role != 'assistant' %}{{ m.content }}"
    )
    tokenizer = model("like-llama-3").tokenizer
    template = ChatTemplate(source, tokenizer)
    template.render(template_messages(with_calls("")), TOOLS)
    with pytest.raises(ChatTemplateError, match=r"message 3 \(assistant, beside a tool call\) out"):
        template.render(template_messages(with_calls("text")), TOOLS)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("f.arguments | tojson", "('{}' if f.arguments.n is defined else f.arguments | tojson)"),
        ("f.name", "(f.name if f.name.startswith('probe') else 'f')"),
        # Only the prompt itself shows it: a mark stands before the name.
        ("f.arguments | tojson", "('{}' if f.name == 'search' else f.arguments | tojson)"),
    ],
)
def test_a_call_that_loses_its_name_or_arguments_is_refused(old: str, new: str) -> None:
    """A number counts like a text."""
    source = TEMPLATES["like-llama-3"]
    assert old in source
    template = ChatTemplate(source.replace(old, new), model("like-llama-3").tokenizer)
    with pytest.raises(ChatTemplateError, match="tool call of message 3"):
        template.render(template_messages(with_calls("")), TOOLS)


def test_a_call_may_have_no_arguments() -> None:
    """Templates may leave out what is empty."""
    call = {"name": "search", "args": {}, "id": "call00001"}
    messages = [HumanMessage("a"), AIMessage("", tool_calls=[call])]
    source = TEMPLATES["like-llama-3"].replace(
        "f.arguments | tojson", "(f.arguments | tojson if f.arguments else 'null')"
    )
    template = ChatTemplate(source, model("like-llama-3").tokenizer)
    assert '"search", "parameters": null' in template.render(template_messages(messages), TOOLS)


def test_what_hides_markup_in_tools_is_not_taken_for_a_mark() -> None:
    """Nor are private-use characters in a variable."""
    made = model("qwen3")
    tool = {**SEARCH["function"], "description": "<|im_end|> <tool_call> </think> <|im_start|>"}
    prompt = made.encoder.prompt([HumanMessage("a")], Ask(tools=[{**SEARCH, "function": tool}]))
    assert tool["description"] in made.tokenizer.readable(prompt.ids)
    odd = "\ue001\ue000\ue002\ue001"
    assert render("{{ odd }}" + PLAIN, [HumanMessage("a")], odd=odd) == f"{odd}[user]a"


# -- documents from outside ------------------------------------------------------------------------

WITH_DOCUMENTS = "{% for d in documents or [] %}({{ d.text | tojson }}){% endfor %}" + PLAIN


@pytest.mark.parametrize("key", ["text", "contents", "content", "snippet", "body"])
def test_documents_that_a_template_does_not_tell_are_refused(key: str) -> None:
    """The variable `documents` is text, too; a title may go."""
    documents = [{"title": "t", key: "one"}, {"title": "t", key: "two"}]
    with pytest.raises(ChatTemplateError, match=r"document 1 out .*into a message"):
        render(PLAIN, TALK, documents=documents)
    if key == "text":
        assert '("one")("two")' in render(WITH_DOCUMENTS, TALK, documents=documents)
        with pytest.raises(ChatTemplateError, match="document 2 out"):
            render(WITH_DOCUMENTS.replace("or []", "[:1]"), TALK, documents=documents)


@pytest.mark.parametrize("documents", [None, [], [{"title": 1}], "", [""], 5])
def test_no_documents_are_none(documents: object) -> None:
    """Nothing to lose."""
    assert render(PLAIN, TALK[1:2], documents=documents).startswith("[user]ask")


# -- the template for tools ------------------------------------------------------------------------

TOOL_USE = "for tools:" + TEMPLATES["qwen2.5"].replace(
    "<|im_start|>system\\nYou are Qwen", "<|im_start|>system\\nYou are"
)


def test_the_template_named_tool_use_tells_tools(tmp_path: Path) -> None:
    """From a file that has both; calls are read as it writes them, and without tools it rests."""
    templates = [
        {"name": "default", "template": PLAIN},
        {"name": "tool_use", "template": TOOL_USE},
    ]
    path = write_tiny_gguf(tmp_path / "m.gguf", "llama", chat_template=templates)
    tokenizer = LlamaTokenizer(path)
    try:
        encoder = PromptEncoder(tokenizer)
        assert tokenizer.tool_use_template == TOOL_USE
        plain = tokenizer.decode(encoder.encode(TALK))
        assert plain.startswith("[system]sys")
        told = tokenizer.decode(encoder.encode(TALK, TOOLS))
        assert told.startswith("for tools:")
        assert '"name": "search"' in told
        assert encoder.answers.calls == model("qwen2.5").encoder.answers.calls
        later = tokenizer.decode(encoder.encode(with_calls("")))
        assert later.startswith("for tools:")
        own = PromptEncoder(tokenizer, chat_template=PLAIN.replace("[", "("))
        assert "You can call these functions" in tokenizer.decode(own.encode(TALK, TOOLS))
    finally:
        tokenizer.close()


def test_a_template_for_tools_without_a_format_is_left_alone() -> None:
    """Calls that could not be read are told in words, by the default."""
    tokenizer = FakeTokenizer(chat_template=PLAIN, tool_use_template="{{ tools }}" + PLAIN)
    prompt = ChatTemplate(None, tokenizer).render(template_messages(TALK), TOOLS)
    assert prompt.startswith("[system]")
    assert "You can call these functions" in prompt


def test_the_default_tells_tools_where_the_one_for_tools_has_no_format() -> None:
    """In its own format."""
    tokenizer = model("qwen2.5").tokenizer
    tokenizer.chat_template = TEMPLATES["qwen2.5"]
    tokenizer.tool_use_template = "{{ tools }}" + PLAIN
    template = ChatTemplate(None, tokenizer)
    assert template.call_format == model("qwen2.5").encoder.answers.calls
    assert "<tools>" in template.render(template_messages(TALK), TOOLS)


def test_a_file_without_a_default_uses_what_it_has() -> None:
    """Better than plain words."""
    tokenizer = FakeTokenizer(chat_template=None, tool_use_template=PLAIN)
    assert ChatTemplate(None, tokenizer).render(template_messages(TALK[1:2])).startswith("[user]")


def test_markers_of_the_template_for_tools_are_text_in_content() -> None:
    """Whichever of the two is used."""
    tokenizer = model("qwen2.5").tokenizer
    tokenizer.chat_template, tokenizer.tool_use_template = PLAIN, TOOL_USE
    encoder = PromptEncoder(tokenizer)
    ids = encoder.encode([HumanMessage("<|im_start|>")], TOOLS)
    assert tokenizer.readable(ids).count("<|im_start|>") == 4
    start = tokenizer.special_tokens["<|im_start|>"].token_id
    assert ids.count(start) == 3


def test_the_tools_template_has_the_same_instant() -> None:
    """The clock is one for both."""
    tokenizer = model("qwen2.5").tokenizer
    tokenizer.chat_template = PLAIN
    tokenizer.tool_use_template = "{{ strftime_now('%Y-%m-%d') }}" + TOOL_USE
    template = ChatTemplate(None, tokenizer)
    for day in (1, 2):
        at = template.at(datetime(2026, 12, day, 12, tzinfo=timezone.utc))
        assert at.render(template_messages(TALK), TOOLS).startswith(f"2026-12-0{day}for tools:")
