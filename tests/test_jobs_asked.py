"""Rows of a batch file: every field is honoured or refused, whatever a row is made of."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import BadRequest
from headrace.jobs.asked import CHAT, TEXT, Asked, derived_seed, parse_line, understand
from helpers_chat import chat, row

GOOD = row("a", {"prompt": "hello"})
FIELDS = (
    "model", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "frequency_penalty", "presence_penalty",
    "logit_bias", "logprobs", "user", "stream", "top_k", "min_p", "repeat_penalty", "ignore_eos", "messages", "prompt",
    "max_completion_tokens", "top_logprobs", "response_format", "echo", "best_of", "suffix", "tools",
)  # fmt: skip
BAD: list[tuple[dict[str, Any], str]] = [
    ({"method": "GET"}, "method"),
    ({"url": "/v1/embeddings"}, "url"),
    ({"url": ["/v1/completions"]}, "url"),
    ({"url": None}, "url"),
    ({"body": []}, "body"),
    ({"extra": 1}, "'extra'"),
    ({"custom_id": ""}, "custom_id"),
    ({"custom_id": 7}, "custom_id"),
    ({"custom_id": "x" * 513}, "custom_id"),
    ({"custom_id": "\ud800"}, "surrogate"),
]
BAD_BODY: list[tuple[dict[str, Any], str]] = [
    ({"tools": []}, "'tools'"),
    ({"prompt": 3}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"temperature": -(10**400)}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"min_p": 2}, "min_p"),
    ({"top_k": -1}, "top_k"),
    ({"repeat_penalty": 0}, "repeat_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ({"n": 0}, "n is"),
    ({"n": 129}, "n is"),
    ({"n": 2, "best_of": 3}, "best_of"),
    ({"best_of": 2}, "best_of"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"),
    ({"logit_bias": {"01": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "from -100 to 100"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"presence_penalty": None, "presence_penalti": 1}, "'presence_penalti'"),
    ({"stream": True}, "stream"),
    ({"stream": 0}, "stream"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"user": 5}, "user"),
    ({"model": 5}, "model"),
    ({"ignore_eos": 1}, "ignore_eos"),
]
BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [3]}, "messages"),
    ({"prompt": "x"}, "'prompt'"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 3}, "both"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"echo": False}, "'echo'"),
]


@pytest.mark.parametrize(("change", "word"), BAD)
def test_bad_rows_are_refused_by_name(change: dict[str, Any], word: str) -> None:
    with pytest.raises(BadRequest, match=word):
        understand({**GOOD, **change}, 0)


@pytest.mark.parametrize(("change", "word"), BAD_BODY)
def test_bad_bodies_are_refused_by_name(change: dict[str, Any], word: str) -> None:
    with pytest.raises(BadRequest, match=word) as caught:
        understand(row("a", {"prompt": "hello", **change}), 0)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(("change", "word"), BAD_CHAT)
def test_bad_chats_are_refused_by_name(change: dict[str, Any], word: str) -> None:
    with pytest.raises(BadRequest, match=word):
        understand(chat("a", "hello", **change), 0)


def test_values_go_where_they_belong() -> None:
    body = {
        "prompt": "p", "model": "m", "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "n": 3, "best_of": 3,
        "stop": ["x", "y"], "seed": -1, "frequency_penalty": 0.25, "presence_penalty": -0.5, "top_k": 7, "min_p": 0.1,
        "logit_bias": {"12": 3, "5": -100}, "logprobs": 2, "user": "u", "stream": False, "repeat_penalty": 1.5,
        "ignore_eos": True, "echo": False, "suffix": "",
    }  # fmt: skip
    asked = understand(row("a", body), 0)
    s = asked.sampling
    assert (asked.prompt, asked.model, asked.max_tokens, asked.choices, asked.stop) == ("p", "m", 9, 3, ("x", "y"))
    assert asked.ignore_eos and asked.messages is None and asked.url == TEXT
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.seed) == (0.5, 0.9, 7, 0.1, 2**64 - 1)
    assert (s.frequency_penalty, s.presence_penalty, s.repeat_penalty, s.repeat_last_n) == (0.25, -0.5, 1.5, -1)
    assert s.bias == ((5, -100.0), (12, 3.0)) and s.logprobs == 3


def test_defaults_are_the_interfaces_own() -> None:
    asked = understand(GOOD, 5)
    assert asked.max_tokens == 16 and asked.choices == 1 and asked.stop == () and asked.model is None
    assert asked.sampling.temperature == 1.0 and asked.sampling.seed == derived_seed(5, "a")
    talk = understand(chat("a", "x", logprobs=True, top_logprobs=20), 5)
    assert talk.max_tokens is None and talk.sampling.logprobs == 21 and talk.url == CHAT
    assert understand(chat("a", "x", logprobs=True), 5).sampling.logprobs == 1
    assert understand(chat("a", "x", logprobs=False), 5).sampling.logprobs == 0
    assert understand(row("a", {"prompt": ["one"]}), 0).prompt == "one"
    assert understand(row("a", {"prompt": [3, 4]}), 0).prompt == (3, 4)


def test_a_rows_seed_is_its_own_and_its_jobs() -> None:
    seeds = {derived_seed(job, name) for job in range(4) for name in ("a", "b", "0", "1", "")}
    assert len(seeds) == 20
    assert derived_seed(1, "2a") != derived_seed(12, "a")


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (b"{", "JSON"),
        (b"[1]", "list"),
        (b"null", "NoneType"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": 1} x', "JSON"),
        (b'{"a": 1, "a": 1}', "twice"),
        (b'{"b": {"c": 1, "c": 2}}', "twice"),
        (b"\xff{}", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "JSON"),
        ('{"a": 1}'.encode("utf-16"), "JSON"),
    ],
)
def test_lines_that_are_no_rows(line: bytes, word: str) -> None:
    with pytest.raises(BadRequest, match=word):
        parse_line(line)


def test_a_byte_order_mark_is_no_harm() -> None:
    assert parse_line(b'\xef\xbb\xbf{"a": 1}\r\n') == {"a": 1}


deep = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([10**400, "\ud800", "1", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.just("9"), inner, max_size=3),
    max_leaves=8,
)
bodies = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=4), deep, max_size=5)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([GOOD, chat("c", "hi")]), bodies, st.booleans(), deep, deep, deep)
def test_nothing_but_a_bad_request(
    base: dict[str, Any], body: Any, add: bool, url: Any, method: Any, name: Any
) -> None:
    rows = [{**base, "body": {**base["body"], **body} if add else body}]
    rows += [{**base, key: value} for key, value in (("url", url), ("method", method), ("custom_id", name))]
    for one in rows:
        before = copy.deepcopy(one)
        try:
            assert isinstance(understand(one, 0), Asked)
        except BadRequest as error:
            assert len(str(error)) < 400
            str(error).encode("utf-8", "backslashreplace")
        assert repr(one) == repr(before)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60) | deep.map(lambda v: json.dumps(v).encode("utf-8")))
def test_no_line_is_more_than_a_bad_request(line: bytes) -> None:
    try:
        found = parse_line(line)
    except BadRequest:
        return
    assert isinstance(found, dict)


def test_depth_is_no_recursion_error() -> None:
    nested: Any = []
    for _ in range(5000):
        nested = [nested]
    for name in FIELDS:
        for value in (nested, {"type": nested}, {"9": nested}):
            try:
                understand(row("a", {"prompt": "x", name: value}), 0)
            except BadRequest as error:
                assert len(str(error)) < 400
