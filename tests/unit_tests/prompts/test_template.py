"""Templates: the sandbox holds, work is bounded, and a refusal is one clear error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

from langchain_swarmkv.engine.fake import FakeTokenizer
from langchain_swarmkv.errors import ChatTemplateError
from langchain_swarmkv.prompts.messages import template_messages
from langchain_swarmkv.prompts.sandbox import MAX_TEMPLATE_CHARS, compile_template
from langchain_swarmkv.prompts.template import ChatTemplate

TALK = template_messages([SystemMessage("sys"), HumanMessage("hi")])
CHATML = FakeTokenizer().chat_template
NO_SYSTEM = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
SILENT = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def render(source: str | None, messages: list[dict[str, Any]] = TALK, **variables: object) -> str:
    return ChatTemplate(source, FakeTokenizer(), variables).render(messages)


def test_the_models_own_template_is_used_unless_overridden() -> None:
    """Override, then the model's, then plain words."""
    text = "{{ messages[0].content }}"
    own = FakeTokenizer(chat_template=f"own {text}")
    none = FakeTokenizer(chat_template=None)
    assert ChatTemplate(f"given {text}", own).render(TALK[1:]) == "given hi"
    assert ChatTemplate(None, own).render(TALK[1:]) == "own hi"
    assert "User: hi" in ChatTemplate(None, none).render(TALK[1:])


def test_the_plain_fallback_has_no_markup() -> None:
    """Models without a template get words and blank lines, ending where the answer begins."""
    talk = template_messages(
        [
            SystemMessage("Read."),
            HumanMessage("hi"),
            AIMessage("hello"),
            ToolMessage("42", tool_call_id="1"),
            HumanMessage("bye"),
        ]
    )
    tokenizer = FakeTokenizer(chat_template=None)
    assert ChatTemplate(None, tokenizer).render(talk) == (
        "Read.\n\nUser: hi\n\nAssistant: hello\n\n"
        "User: <tool_response>\n42\n</tool_response>\n\nUser: bye\n\nAssistant:"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['x'] }}",
        "{{ strftime_now.__globals__['__builtins__'] }}",
        "{{ self._TemplateReference__context.environment.__class__.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ (messages|map(attribute='__class__')|first).__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{{ messages[0].clear() }}",
        "{{ messages.pop() }}",
    ],
)
@pytest.mark.parametrize("from_model", [True, False])
def test_a_template_cannot_reach_out(source: str, from_model: bool) -> None:
    """Escapes and changes end in an error that names the model, whoever gave the template."""
    messages = copy.deepcopy(TALK)
    tokenizer = FakeTokenizer(chat_template=source if from_model else CHATML, name="evil.gguf")
    template = ChatTemplate(None if from_model else source, tokenizer)
    with pytest.raises(ChatTemplateError, match=r"chat template of 'evil\.gguf'"):
        template.render(messages)
    assert messages == TALK


def test_attributes_of_python_print_as_nothing() -> None:
    """Where jinja does not raise, nothing of Python's inside leaks."""
    source = "{{ ''.__class__ }}{{ messages.__len__ }}|{{ messages[0].content }}"
    assert render(source, TALK[1:]) == "|hi"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% set s = 'a' * 1000 %}{% for a in s %}{% for b in s %}{% for c in s %}"
        "{% endfor %}{% endfor %}{% endfor %}",
        "{% macro twice(n) %}{% if n %}{{ twice(n-1) }}{{ twice(n-1) }}{% endif %}{% endmacro %}"
        "{{ twice(60) }}",
        "{% macro forever() %}{{ forever() }}{% endmacro %}{{ forever() }}",
        "{{ 'a' * 10**9 }}",
        "{{ [0] * 10**9 }}",
        "{{ 10 ** (10 ** 9) }}",
        "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{% for i in range(50000) %}{{ 'a' * 1000 }}{% endfor %}",
    ],
)
def test_work_is_bounded(source: str) -> None:
    """Endless loops and giant results end in an error, soon."""
    with pytest.raises(ChatTemplateError, match="refuses these messages"):
        render(source)


def test_a_template_cannot_raise_its_own_bound() -> None:
    """The counter of turns is out of a template's reach."""
    source = "{{ work }}{{ _count_turn }}{{ 1 | _count_turn }}|{{ messages[0].content }}"
    assert render(source, TALK[1:]) == "|hi"


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'a", "{% for %}", "{{ x | no_such_filter }}"])
def test_a_template_that_does_not_parse_is_refused_at_once(source: str) -> None:
    """A broken template is an error of the template, with the model's name and the reason."""
    with pytest.raises(ChatTemplateError, match="'fake' cannot be used"):
        ChatTemplate(source, FakeTokenizer())


def test_an_overlong_template_is_refused() -> None:
    """Parsing is bounded too."""
    with pytest.raises(ChatTemplateError, match="limit"):
        ChatTemplate("a" * (MAX_TEMPLATE_CHARS + 1), FakeTokenizer())


def test_templates_are_compiled_once() -> None:
    """The same source is the same compiled template."""
    assert compile_template("{{ 1 }}") is compile_template("{{ 1 }}")


def test_the_dialect_of_hugging_face_is_understood() -> None:
    """Block trimming, loop controls, tojson, generation marks, the date, and the usual names."""
    source = (
        "{% for m in messages %}\n"
        "    {% if loop.index0 == 0 %}{% continue %}{% endif %}\n"
        "{% generation %}{{ m.content }}{% endgeneration %}\n"
        "{% break %}\n"
        "{% endfor %}\n"
        "{{ {'a': '<é>'} | tojson }} {{ ['é'] | tojson(ensure_ascii=true) }} "
        "{{ strftime_now('%Y') }} {{ bos_token }} {{ eos_token }} {{ add_generation_prompt }} "
        "{{ tools is none }} {{ documents is none }} {{ enable_thinking }}"
    )
    talk = template_messages([HumanMessage(""), HumanMessage("two"), HumanMessage("")])
    assert render(source, talk, enable_thinking=False) == (
        'two{"a": "<é>"} ["\\u00e9"] 2000 <|bos|> <|im_end|> True True True False'
    )


def test_template_variables_cannot_replace_the_messages() -> None:
    """chat_template_kwargs add to what a template sees; the conversation stays."""
    variables = {"messages": [], "add_generation_prompt": False, "tools": [1]}
    source = (
        "{{ messages|length }} {{ add_generation_prompt }} {{ tools }} {{ messages[0].content }}"
    )
    template = ChatTemplate(source, FakeTokenizer(), variables)
    assert template.render(TALK[1:]) == "1 True [1] hi"


@pytest.mark.parametrize("source", [NO_SYSTEM, SILENT])
def test_a_system_text_is_folded_where_there_is_no_system_role(source: str) -> None:
    """Refused or silently dropped, the text ends up in the first user turn."""
    assert render(source) == "[user]sys\n\nhi"


def test_a_template_with_a_system_role_keeps_it() -> None:
    """No folding without need."""
    assert render("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}") == (
        "[system]sys[user]hi"
    )


def test_a_trimmed_system_text_is_not_taken_for_a_dropped_one() -> None:
    """Templates may trim or quote the system text."""
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim | tojson }}{% endfor %}"
    talk = template_messages([SystemMessage('  say "x"\n'), HumanMessage("hi")])
    assert render(source, talk) == '[system]"say \\"x\\""[user]"hi"'


def test_a_second_system_message_that_would_be_dropped_joins_the_first() -> None:
    """Templates that print only the first system message would lose the rest."""
    source = (
        "{{ messages[0].content if messages[0].role == 'system' }}"
        "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    talk = template_messages([SystemMessage("one"), SystemMessage("two"), HumanMessage("hi")])
    assert render(source, talk) == "one\n\ntwo[user]hi"


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([HumanMessage("a"), HumanMessage("b")], "[user]a\n\nb"),
        ([SystemMessage("s"), AIMessage("b")], "[user]s[assistant]b"),
        ([SystemMessage("s")], "[user]s"),
    ],
)
def test_strict_alternation_is_met_by_merging(messages: list[Any], text: str) -> None:
    """Neighbours of one role become one turn where the template insists on alternation."""
    assert render(NO_SYSTEM, template_messages(messages)) == text


def test_a_system_role_is_kept_where_merging_is_enough() -> None:
    """Strict alternation after a system message: only the user turns become one."""
    source = (
        "{% for m in messages %}"
        "{% if loop.index0 > 0 and m.role == messages[loop.index0 - 1].role %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    talk = template_messages([SystemMessage("s"), HumanMessage("a"), HumanMessage("b")])
    assert render(source, talk) == "[system]s[user]a\n\nb"


def test_what_cannot_be_folded_is_one_clear_error() -> None:
    """The error names the model, the roles and the template's own reason."""
    talk = template_messages([AIMessage("a"), HumanMessage("b")])
    with pytest.raises(ChatTemplateError) as error:
        render(NO_SYSTEM, talk)
    assert "'fake'" in str(error.value)
    assert "assistant, user" in str(error.value)
    assert "Conversation roles must alternate" in str(error.value)
    assert error.value.facts["roles"] == ["assistant", "user"]


def test_both_reasons_are_told_when_folding_does_not_help() -> None:
    """A template that refuses the folded conversation as well says why twice."""
    with pytest.raises(ChatTemplateError, match=r"never.*folded.*never"):
        render("{{ raise_exception('never') }}")
