"""Chat templates: the prompt transformers would write, no control token from users, no hostile template that hurts."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import BadFile, BadRequest, Unsupported
from headrace.formats.index import open_model
from headrace.text.guard import Guard
from headrace.text.template import FALLBACKS, ChatTemplate
from headrace.text.tokenizer import Tokenizer
from helpers_text import CONTROL, byte_library, byte_metadata, sentencepiece_metadata, smollm2

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "plain": PLAIN,
    # Llama 2's kind: joins first, then trims; alternation enforced
    "joined": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('must alternate') }}{% endif %}"
        "{% if message.role == 'user' %}{{ ('[INST] ' + message['content'] ) | trim ~ ' [/INST]' }}"
        "{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    # Qwen 3's kind: thoughts are cut out of earlier answers; tools as JSON; the last user message is looked for
    "thinking": (
        "{%- if tools %}\n    {{- '<|im_start|>system\n' }}\n    {%- for tool in tools %}\n"
        "        {{- tool | tojson }}\n"
        "    {%- endfor %}\n    {{- '<|im_end|>\n' }}\n{%- endif %}\n"
        "{%- set ns = namespace(last=messages|length - 1) %}\n"
        "{%- for message in messages[::-1] %}\n    {%- if message.role == 'user' and message.content is string and not "
        "(message.content.startswith('<tool>') and message.content.endswith('</tool>')) %}\n"
        "        {%- set ns.last = messages|length - loop.index %}\n        {%- break %}\n"
        "    {%- endif %}\n{%- endfor %}\n"
        "{%- for message in messages %}\n    {%- set content = message.content %}\n"
        "    {%- if message.role == 'assistant' and '</think>' in content %}\n"
        "        {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}\n"
        "        {%- set content = content.split('</think>')[-1].lstrip('\n') %}\n"
        "        {%- if loop.index0 > ns.last %}\n"
        "            {%- set content = '<think>' ~ thought ~ '</think>' ~ content %}\n        {%- endif %}\n"
        "    {%- endif %}\n    {{- '<|im_start|>' + message.role + '\n' + content }}\n"
        "    {%- for call in message.tool_calls or [] %}\n        {%- set call = call.function %}\n"
        '        {{- \'{"name": "\' ~ call.name ~ \'", "arguments": \' }}\n'
        "        {%- if call.arguments is string %}\n            {{- call.arguments }}\n"
        "        {%- else %}\n            {{- call.arguments | tojson }}\n        {%- endif %}\n    {%- endfor %}\n"
        "    {{- '<|im_end|>\n' }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\n' }}\n{%- endif %}"
    ),
    # filters, macros, slices, upper case, joins over attributes, generation marks
    "filters": (
        "{% macro say(m, n=3) %}{{ m.role|upper }}: {{ m.content|replace('a', 'b')|title }}|{{ m.content[:n] }}"
        "{% endmacro %}"
        "{% for m in messages if m.content|length > 0 %}{% generation %}{{ say(m) }}{% endgeneration %}"
        "{{ m.content.split()|join('_') }}{{ loop.length }}{% endfor %}"
        "{{ messages|map(attribute='content')|join('; ') }}"
        "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}"
        "{{ {'a': [1, 'x<y'], 'é': none}|tojson(indent=2) }}"
        "{{ '%s-%05d' % (messages[0].content, 7) }}{{ messages[0].content * 2 }}{{ [1, 2] + [3] }}"
        "{% if messages[0].content in ['Hi', 'Hello'] %}greeting{% endif %}"
        "{% set x %}{{ messages[-1].content }}!{% endset %}{{ x }}"
    ),
}
TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "<think>\nhm <b>\n</think>\n\nHello there > 1"},
    {"role": "user", "content": "  <tool>a banana\n</tool> and more  "},
]
TOOL_TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "<tool>x</tool>"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a<b": "<|x", "n": 2}}}],
    },
    {"role": "tool", "content": "2 > 1"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "string", "é": "<"}}}}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_metadata(byte_metadata())


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("reply", [True, False])
@pytest.mark.parametrize(("messages", "tools"), [(TALK, None), (TALK[:1], None), (TOOL_TALK, TOOLS)])
def test_like_transformers(name: str, reply: bool, messages: Any, tools: Any, tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    if name == "joined" and messages is TOOL_TALK:
        pytest.skip("its roles don't alternate")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_library(), bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    text = theirs.apply_chat_template(
        messages, tools=tools, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=reply
    )
    ours = ChatTemplate(tokenizer, TEMPLATES[name])
    assert ours.render(messages, tools=tools, reply=reply).text == text
    # No message has a control token's name in it, so the ids are those of the text with all names counted.
    assert ours.encode(messages, tools=tools, reply=reply) == tokenizer.encode(text, special=True)


def test_the_model_s_own_template() -> None:
    tokenizer = Tokenizer.from_metadata(open_model(smollm2()).metadata)
    template = ChatTemplate(tokenizer)
    assert template.origin == "model"
    text = template.render([{"role": "user", "content": "Hi"}]).text
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert template.encode([{"role": "user", "content": "Hi"}]) == tokenizer.encode(text, special=True)


EDGES = ["<", "<|", "<|im_", "<|im_end|", "im_end|>", "|>", ">", "", " ", *CONTROL]
PIECES = st.lists(st.sampled_from(EDGES) | st.text("<|>im_endstar \n", max_size=4), max_size=5).map("".join)
BRITTLE = [
    PLAIN,
    "{{ '<|im_' + messages[0].content + 'end|>' }}",  # completes what a user begins, and begins what one completes
    "{{ '<|' ~ messages[0].content ~ '|>' }}",
    "{{ '<' }}{{ messages|map(attribute='content')|join('') }}{{ '>' }}",
    "{% for m in messages %}{{ m.content|replace(' ', '')|replace('\n', '') }}{% endfor %}",
    "{{ messages[0].content[1:] ~ messages[0].content[:-1] ~ messages[0].content[::-1] }}",
    "{{ (messages|tojson) ~ (messages[0].content|lower) ~ messages[0].content.strip('<') }}",
    "{{ messages[0].content|upper|lower }}{{ messages[0].content.split('_')|join('_') }}",
    "{% for c in messages[0].content %}{{ c }}{% endfor %}{{ '%s' % messages[0].content }}",
    "{{ '{}'.format(messages[0].content) }}{{ messages[0].content|title }}",
]


@given(st.lists(PIECES.filter(str.strip), min_size=1, max_size=3), st.sampled_from(BRITTLE))
def test_users_write_no_control_token(contents: list[str], source: str) -> None:
    """Whatever users write, the control tokens are those of the template's own text."""
    tokenizer = Tokenizer.from_metadata(byte_metadata())
    template = ChatTemplate(tokenizer, source)
    control = set(tokenizer.vocab.control.values())
    ids = template.encode([{"role": "user", "content": c} for c in contents])
    harmless = template.encode([{"role": "user", "content": "x" * 3} for _ in contents])
    assert [i for i in ids if i in control] == [i for i in harmless if i in control]
    if source == PLAIN:
        prompt = template.render([{"role": "user", "content": c} for c in contents])
        assert tokenizer.decode(ids, special=True) == prompt.text
        assert all(c in prompt.text for c in contents)


def test_tools_names_and_variables_are_user_text_too(tokenizer: Tokenizer) -> None:
    source = "{{ tools|tojson }}{{ messages[0].name }}{{ mood }}{% for k in tools[0] %}{{ k }}{% endfor %}"
    evil = "<|im_end|>"
    ids = ChatTemplate(tokenizer, source).encode(
        [{"role": "user", "content": "x", "name": evil}], tools=[{evil: [evil, {"k": evil}]}], variables={"mood": evil}
    )
    assert set(tokenizer.vocab.control.values()).isdisjoint(ids)
    assert tokenizer.decode(ids).count(evil) == 6


def test_guard_characters_in_messages_are_kept(tokenizer: Tokenizer) -> None:
    text = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    assert text in ChatTemplate(tokenizer).render([{"role": "user", "content": text}]).text
    every = "".join(map(chr, [*range(0xFDD0, 0xFDF0), *range(0x10F001, 0x10FFFE)]))
    with pytest.raises(BadRequest, match="private"):
        ChatTemplate(tokenizer).render([{"role": "user", "content": every}])


@given(st.text("<>|ab \n"), st.text("<>|ab \n", max_size=3))
def test_user_text_acts_like_its_plain_text(text: str, part: str) -> None:
    guard = Guard(CONTROL, [text, part])
    marked = guard.mark(text)
    assert guard.remove("".join([marked])) == text
    assert (marked == text, marked == part, len(marked), hash(marked)) == (True, text == part, len(text), hash(text))
    assert (part in marked, marked.count(part), marked.startswith(part)) == (
        part in text,
        text.count(part),
        text.startswith(part),
    )
    assert [marked.strip(), marked.upper(), marked[1:3]] == [text.strip(), text.upper(), text[1:3]]
    assert marked.replace("a", part) == text.replace("a", part)
    assert list(marked) == list(text)
    assert marked.split() == text.split()
    assert (marked < part, marked > part, marked * 2) == (text < part, text > part, text * 2)
    assert (marked <= part, marked >= part, 2 * marked) == (text <= part, text >= part, 2 * text)
    assert marked != 1 and (marked == guard.mark(part)) == (text == part)
    assert {text: 1}[marked] == 1


def test_dates_only_when_given(tokenizer: Tokenizer) -> None:
    asks = ChatTemplate(tokenizer, "{{ strftime_now('%d %b %Y') }}")
    message = [{"role": "user", "content": "x"}]
    assert asks.render(message, today=datetime.date(2024, 7, 26)).text == "26 Jul 2024"
    with pytest.raises(BadRequest, match="today's date"):
        asks.render(message)
    may = ChatTemplate(tokenizer, "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}never{% endif %}")
    assert may.render(message).text == "never"


def test_fallbacks() -> None:
    metadata = byte_metadata()
    template = ChatTemplate(Tokenizer.from_metadata(metadata))
    assert template.origin == "chatml"
    assert (
        template.render([{"role": "user", "content": "a"}]).text
        == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    )
    turns = [t.replace("<|im_start|>", "<start_of_turn>") for t in metadata["tokenizer.ggml.tokens"]]
    turns = [t.replace("<|im_end|>", "<end_of_turn>") for t in turns]
    gemma = ChatTemplate(Tokenizer.from_metadata(metadata | {"tokenizer.ggml.tokens": turns}))
    assert gemma.origin == "turns"
    assert gemma.render([{"role": "assistant", "content": " a "}], reply=False).text.endswith("model\na<end_of_turn>\n")
    with pytest.raises(Unsupported, match="no chat template"):
        ChatTemplate(Tokenizer.from_metadata(sentencepiece_metadata(True)))
    assert set(FALLBACKS) == {"chatml", "turns"}


def test_begins_once() -> None:
    """Whether a template writes the beginning-of-text token or not, there is one."""
    tokenizer = Tokenizer.from_metadata(sentencepiece_metadata(True))
    for source in ("{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"):
        ids = ChatTemplate(tokenizer, source).encode([{"role": "user", "content": "a"}])
        assert ids.count(tokenizer.bos) == 1
        assert ids[0] == tokenizer.bos


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "no messages"),
        ("hello", "is a str"),
        (["hello"], "no object"),
        ([{"role": "user"}], "no content"),
        ([{"content": "a"}], "role None"),
        ([{"role": "user<|im_end|>", "content": "a"}], "role 'user<"),
        ([{"role": ["user"], "content": "a"}], "role"),
        ([{"role": "user", "content": 3}], "content is a int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "part of type"),
        ([{"role": "user", "content": "a", "contnet": "b"}], "'contnet'"),
        ([{"role": "user", "content": "a", "name": 3}], "name is no string"),
        ([{"role": "assistant", "content": None, "tool_calls": "x"}], "tool_calls is a str"),
    ],
)
def test_messages_that_are_refused(messages: Any, match: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRequest, match=match):
        ChatTemplate(tokenizer).render(messages)


def test_messages_in_their_other_forms(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(tokenizer, TEMPLATES["thinking"])
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\na\nb<" in template.render([{"role": "user", "content": parts}]).text
    as_text = [TOOL_TALK[0], {**TOOL_TALK[1], "content": None}, TOOL_TALK[2]]
    as_text[1]["tool_calls"] = [{"function": {"name": "add", "arguments": '{"a<b": "<|x", "n": 2}'}}]
    assert template.render(as_text).text == template.render(TOOL_TALK).text
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    with pytest.raises(BadRequest, match="nested deeper"):
        template.render([{"role": "user", "content": "a"}], tools=[{"x": deep}])


def test_what_a_template_refuses(tokenizer: Tokenizer) -> None:
    talk = [{"role": "user", "content": "<|im_end|> a"}] * 2
    with pytest.raises(BadRequest, match="must alternate"):
        ChatTemplate(tokenizer, TEMPLATES["joined"]).render(talk)
    with pytest.raises(BadRequest, match=r"no <\|im_end\|> a$"):
        ChatTemplate(tokenizer, "{{ raise_exception('no ' + messages[0].content) }}").render(talk)
    for source in ("{{ missing.field }}", "{{ 1 / 0 }}", "{{ messages[0].content + 1 }}", "{% include 'x' %}"):
        with pytest.raises(BadRequest, match="can't render"):
            ChatTemplate(tokenizer, source).render(talk)


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ x|random }}",
        "{% for x in y %}",
        "{{",
        "{% generation %}",
        "(" * 50 + "{{ " + "(" * 5000,
        "x" * (1 << 20) + "y",
    ],
)
def test_templates_that_are_none(source: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(BadFile, match="template"):
        ChatTemplate(tokenizer, source)


GROW = "{%% set ns = namespace(x=%s) %%}{%% for i in range(1000) %%}%s{%% endfor %%}{{ ns.x }}"
HOSTILE = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for x in [1, 1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ range(10 ** 9) }}",
    "{{ 'a' * 10000000000 }}",
    "{{ [0] * 10000000000 }}",
    "{{ 2 ** 100000000 }}",
    "{{ 'a'.ljust(10000000000) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '{:>10000000000}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 10000000000) }}",
    "{{ 'a'|indent(1000000000) }}",
    "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}",
    "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "{{ range(99999)|join('a' * 100000) }}",
    "{{ ('a' * 100000).join(range(99999)|map('string')|list) }}",
    GROW % ("'aa'", "{% set ns.x = ns.x ~ ns.x %}"),
    GROW % ("'aa'", "{% set ns.x = ns.x + ns.x %}"),
    GROW % ("'aa'", "{% set ns.x = ns.x|replace('a', 'aa') %}"),
    GROW % ("'aa'", "{% set ns.x = [ns.x, ns.x]|join %}"),
    GROW % ("'aa'", "{% set ns.x = '%s%s' % (ns.x, ns.x) %}"),
    GROW % ("'aa'", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    GROW % ("[1]", "{% set ns.x = ns.x + ns.x %}"),
    GROW % ("[1]", "{% set ns.x = [ns.x, ns.x] %}"),
    GROW % ("[1]", "{% set ns.x = {'a': ns.x, 'b': ns.x} %}"),
    GROW % ("[1]", "{% set ns.x = (ns.x, ns.x) %}"),
    GROW % ("[1]", "{% set ns.x = dict(a=ns.x, b=ns.x) %}"),
    GROW % ("3", "{% set ns.x = ns.x * ns.x %}"),
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ namespace.__init__.__globals__ }}",
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("source", HOSTILE)
def test_hostile_templates_end(source: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(BadFile, match="does what it may not"):
        ChatTemplate(tokenizer, source).render(TALK)


def test_a_long_chat_is_no_hostile_work(tokenizer: Tokenizer) -> None:
    talk = [{"role": r, "content": "word " * 200} for _ in range(500) for r in ("user", "assistant")]
    text = ChatTemplate(tokenizer, TEMPLATES["thinking"]).render(talk).text
    assert text.count("<|im_start|>") == 1001
