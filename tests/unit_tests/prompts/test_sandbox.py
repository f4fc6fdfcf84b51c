"""The sandbox: what templates use is there, and nothing they do is without a bound."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from typing import Any

import pytest
from jinja2.exceptions import SecurityError

from langchain_swarmkv.prompts import sandbox
from langchain_swarmkv.prompts.sandbox import compile_template

TALK = [{"role": "user", "content": " a<b>c "}, {"role": "assistant", "content": "x"}]


def render(source: str, **variables: Any) -> str:
    return sandbox.render(compile_template(source), {"messages": TALK, **variables})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages | length }}{{ messages[0].content.strip() }}", "2a<b>c"),
        ("{{ messages[0].content.split('<b>')[-1] }}|", "c |"),
        ("{{ messages[::-1][0].role }}{{ messages[1:] | length }}", "assistant1"),
        ("{% for m in messages %}{{ loop.previtem.role if loop.previtem }}{% endfor %}", "user"),
        ("{% for k, v in messages[1] | items %}{{ k ~ '=' ~ v }};{% endfor %}", None),
        ("{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}{{ v }}{% endfor %}", "a2b1"),
        ("{{ {'a': [1]} is mapping }}{{ 'a' is string }}{{ 3 | string }}", "TrueTrue3"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ messages | map(attribute='role') | join(', ') }}", "user, assistant"),
        ("{{ messages | join('+', attribute='role') }}", "user+assistant"),
        ("{{ ', '.join(['a', 'b']) }}{{ 'aab' | replace('a', 'c') }}", "a, bccb"),
        ("{% for x in 'ab' %}{{ x.replace('a', 'b') }}{% endfor %}", "bb"),
        ("{{ 'aaa'.replace('a', 'b', 1) }}{{ 'aaa' | replace('a', 'b', 2) }}", "baabba"),
        ("{{ '{}: {:>4}|{a}'.format('x', 1, a=2) }}{{ '%s-%03d' % ('y', 7) }}", "x:    1|2y-007"),
        ("{{ 'a\nb' | indent(2) }}{{ 'a\nb' | indent('--', first=true) }}", "a\n  b--a\n--b"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 2 %}{{ ns.n }}", "3"),
        ("{% set ns = namespace(l=[]) %}{% set ns.l = ns.l + [1, 2] %}{{ ns.l }}", "[1, 2]"),
        (
            "{% macro m(x) %}<{{ x }}{{caller()}}>{% endmacro %}{% call m(1) %}y{% endcall %}",
            None,
        ),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x }}{{ ('a', 'b')[1] }}{{ none }}", "a1bNone"),
        ("{{ raise_exception is defined }}{{ {'a': 1}.get('b', 'c') }}", "Truec"),
    ],
)
def test_what_templates_use_is_there(source: str, text: str | None) -> None:
    """The operations of real chat templates give what plain jinja gives."""
    expected = {"{% for k": "role=assistant;content=x;", "{% macro": "<1y>"}
    assert render(source) == (expected[source[:8]] if text is None else text)


@pytest.mark.parametrize("indent", [None, 2, 4, "\t"])
def test_json_is_that_of_python(indent: int | str | None) -> None:
    """Spaces, scripts and indentation as `json.dumps` writes them."""
    value = {"name": "歪 <é>", "list": [1, 2.5, True, None, {}], "empty": []}
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    assert render("{{ value | tojson(indent=indent) }}", value=value, indent=indent) == text
    assert render("{{ value | tojson(separators=(',', ':'), sort_keys=true) }}", value=value) == (
        json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    )


def test_namespaces_may_stand_in_lists() -> None:
    """Some templates put one of their own before the messages."""
    source = (
        "{% set ns = namespace(role='system', content='kind') %}{% set l = [ns] + messages %}"
        "{% for m in l %}{{ m.role }}:{{ m['content'] }} {% endfor %}"
        "{{ (l | selectattr('role', 'equalto', 'user') | list)[0].content }}"
    )
    messages = [{"role": "user", "content": "hi"}]
    assert render(source, messages=messages) == "system:kind user:hi hi"


@pytest.mark.parametrize(
    "text",
    [
        *("z", "[z]", "{'a': z}", "[z] | string", "z | upper", "[z] | lower", "[z] | join"),
        *("z ~ ''", "'%s' % [z]", "'{}'.format(z)", "[z] | trim", "[z] | e", "[z] | urlencode"),
        *("[z] | replace('a', 'b')", "[z] | tojson", "[z] | title | length"),
    ],
)
def test_a_namespace_is_never_text(text: str) -> None:
    """One that holds another twice, and so on, would be text without end."""
    source = (
        "{% set n = namespace(z=namespace(a='aa')) %}{% for i in range(60) %}"
        "{% set n.z = namespace(a=n.z, b=n.z) %}{% endfor %}{% set z = n.z %}"
    )
    with pytest.raises(Exception, match=r"namespace|Namespace"):
        render(f"{source}{{{{ {text} }}}}")


def test_the_date_is_there() -> None:
    """With the patterns of Llama's templates."""
    instant = datetime(2026, 12, 1, 23, 59, 58)
    written = render("{{ strftime_now('%d %b %Y') }}", strftime_now=sandbox.strftime_at(instant))
    assert written == "01 Dec 2026"


GROW = "{{% set ns = namespace(s='aa') %}}{{% for i in range(60) %}}{}{{% endfor %}}{{{{ ns.s }}}}"
BOMBS = [
    *(
        "{{ 'a'.center(10**9) }}",
        "{{ 'a' * 10**9 }}",
        "{{ [[]] * 10**9 }}",
        "{{ 'a'.zfill(10**9) }}",
    ),
    *("{{ '%1000000000d' % 1 }}", "{{ '%*d' % (10**9, 1) }}", "{{ '%.1000000000f' % 1.0 }}"),
    *("{{ '{:1000000000d}'.format(1) }}", "{{ '{:>{}}'.format('x', 10**9) }}"),
    "{{ '{a:{b}}'.format_map({'a': 'x', 'b': 10**9}) }}",
    "{{ ('a' * 30000000) | replace('a', 'b' * 1000) | length }}",
    "{{ ('a' * 30000000).replace('a', 'b' * 1000) | length }}",
    "{{ ('a' * 30000000).replace('', 'b' * 1000) | length }}",
    "{{ ('a\n' * 9999999) | indent(1000) | length }}",
    "{{ 'a' | indent(10**9, first=true) | length }}",
    "{{ range(99999) | map('string') | join('a' * 9999) | length }}",
    "{{ ('a' * 99999).join(range(99999) | map('string')) | length }}",
    "{{ (['a' * 30000000] * 1000) | length }}",
    "{{ ('a' * 30000000).split('a') | length }}",
    "{{ ('a' * 30000000) | list | length }}",
    "{{ {'a': 1} | tojson(indent=10**9) }}",
    "{{ ([1] * 9999) | tojson(separators=('x' * 99999, ':')) | length }}",
    *("{{ strftime_now('%1000000000Y') }}", "{{ ('\t' * 99999).expandtabs(9999) | length }}"),
    *("{{ (1).to_bytes(10**9, 'big') | length }}", "{{ 'a'.encode('utf-32') }}"),
    "{{ 'a'.translate({97: 'b' * 30000000}) }}",
    *("{{ range(10**9) | list }}", "{{ 10 ** (10 ** 9) }}"),
    "{% for i in range(60000) %}{{ 'a' * 1000 }}{% endfor %}",
    "{% macro m() %}{% for i in range(60000) %}{{ 'a' * 1000 }}{% endfor %}{% endmacro %}{{ m() }}",
    "{% set x %}{% for i in range(60000) %}" + "a" * 1000 + "{% endfor %}{% endset %}",
    "{% for i in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% block a %}{{ self.a() }}{% endblock %}",
    "{% set ns = namespace() %}{% set ns.l = namespace(n=ns) %}{% set ns.n = ns.l %}{{ ns }}",
    "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = [ns.l] %}{% endfor %}"
    "{{ ns.l }}",
    "{% for i in range(199999) %}{% set x = ('a' * 30000000) | upper %}{% endfor %}",
    *(
        GROW.format(step)
        for step in (
            "{% set ns.s = ns.s + ns.s %}",
            "{% set ns.s = ns.s ~ ns.s %}",
            "{% set ns.s = ns.s | join(ns.s) %}",
            "{% set ns.s = ns.s.replace('a', ns.s) %}",
            "{% set ns.s = '%s%s' % (ns.s, ns.s) %}",
            "{% set ns.s = '{0}{0}'.format(ns.s) %}",
            "{% set ns.s = [ns.s, ns.s] %}",
            "{% set ns.s = {'a': ns.s, 'b': ns.s} %}",
            "{% set ns.s = dict(a=ns.s, b=ns.s) %}",
            "{% set ns.s = [ns.s] * 2 %}",
            "{% set ns.s = [ns.s, ns.s] | tojson %}",
            "{% set ns.s = namespace(a=ns.s, b=ns.s) %}",
            "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}",
        )
    ),
    *("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "{{ 'a'" + " | upper" * 50_000 + " }}"),
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
]
LIMITED = """
import datetime, json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
from langchain_swarmkv.prompts import sandbox
from langchain_swarmkv.prompts.sandbox import compile_template, render
sandbox.MAX_SECONDS = 1.0
for source in json.load(sys.stdin):
    try:
        now = sandbox.strftime_at(datetime.datetime(2026, 12, 1))
        render(compile_template(source), {"messages": [], "strftime_now": now})
        print("rendered")
    except Exception as error:
        print(type(error).__name__)
"""


def test_nothing_is_without_a_bound() -> None:
    """Every bomb is refused by the sandbox, before memory or patience run out."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED],
        input=json.dumps(BOMBS),
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    allowed = {"SecurityError", "OverflowError", "RecursionError", "TemplateSyntaxError"}
    outcomes = dict(zip(BOMBS, done.stdout.split(), strict=True))
    assert {bomb[:90]: how for bomb, how in outcomes.items() if how not in allowed} == {}


@pytest.mark.parametrize("name", ["center", "wordwrap", "batch", "slice", "urlize", "pprint"])
def test_filters_without_a_bound_are_not_there(name: str) -> None:
    """Said when the template is compiled."""
    with pytest.raises(Exception, match=f"No filter named '{name}'"):
        compile_template(f"{{{{ 'a' | {name} }}}}")


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that takes long without many turns is stopped at its next turn."""
    monkeypatch.setattr(sandbox, "MAX_SECONDS", -1.0)
    with pytest.raises(SecurityError, match="seconds"):
        render("{% for i in range(2) %}{% endfor %}")
