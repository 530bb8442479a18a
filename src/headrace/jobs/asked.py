"""One row of an OpenAI batch file: checked, and turned into what the engine is asked. Nothing is ignored.

Format: platform.openai.com/docs/api-reference/batch (``custom_id``, ``method``, ``url``, ``body``). A row that can't
be honoured raises BadRequest with a sentence that names the field; it becomes an error row, not the job's end.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import BadRequest
from headrace.run.types import Sampling

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MAX_LINE = 16 << 20
"""Bytes of one row; more is refused before it is parsed."""

_COMMON = frozenset(
    {
        "model", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "frequency_penalty", "presence_penalty",
        "logit_bias", "logprobs", "user", "stream", "top_k", "min_p", "repeat_penalty", "ignore_eos",
    }
)  # fmt: skip
_OWN = {
    CHAT: _COMMON | {"messages", "max_completion_tokens", "top_logprobs", "response_format"},
    TEXT: _COMMON | {"prompt", "echo", "best_of", "suffix"},
}
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "stream": (False, None),
    "response_format": ({"type": "text"}, None),
    "echo": (False, None),
    "best_of": (1, None),
    "suffix": (None, ""),
}
"""Fields known to us of which only the value that changes nothing can be honoured."""


@dataclass(frozen=True)
class Asked:
    """A row that can be computed. choices: how many texts of it (``n``)."""

    custom_id: str
    url: str
    model: str | None
    messages: tuple[Mapping[str, Any], ...] | None
    prompt: str | tuple[int, ...] | None
    max_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    ignore_eos: bool
    choices: int


def derived_seed(job_seed: int, custom_id: str) -> int:
    """A row's seed, whatever its place in the file: 64 bits of SHA-256 over the job's seed and the row's name."""
    digest = hashlib.sha256(f"{job_seed}\0{custom_id}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def parse_line(line: bytes) -> Mapping[str, Any]:
    """A line as a JSON object; BadRequest when it isn't one."""
    if len(line) > MAX_LINE:
        raise BadRequest(f"The line has {len(line)} bytes; at most {MAX_LINE} are taken.")
    try:
        row = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        raise BadRequest(f"The line is no valid JSON ({e}).") from None
    if not isinstance(row, dict):
        raise BadRequest(f"The line is a JSON {type(row).__name__}, not an object.")
    return row


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def custom_id_of(row: Mapping[str, Any]) -> str:
    value = row.get("custom_id")
    if not isinstance(value, str) or not value or len(value) > 512:
        raise BadRequest("custom_id must be a string of 1 to 512 characters.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRequest("custom_id has an unpaired surrogate; send valid Unicode.") from None
    return value


def understand(row: Mapping[str, Any], job_seed: int) -> Asked:
    """Check every field of a row. Raises BadRequest."""
    custom_id = custom_id_of(row)
    unknown = sorted(set(row) - {"custom_id", "method", "url", "body"})
    if unknown:
        raise BadRequest(f"The row has a field {unknown[0]!r} that is not known; leave it out.")
    if row.get("method") != "POST":
        raise BadRequest(f"method is {row.get('method')!r}; it must be 'POST'.")
    url = row.get("url")
    if url not in _OWN:
        raise BadRequest(f"url is {url!r}; it must be {CHAT} or {TEXT}.")
    body = row.get("body")
    if not isinstance(body, dict):
        raise BadRequest("body must be an object.")
    unknown = sorted(set(body) - _OWN[url])
    if unknown:
        raise BadRequest(f"body has a field {unknown[0]!r} that is not known for {url}; leave it out.")
    for name, good in _ONLY.items():
        if name in body and body[name] not in good:
            raise BadRequest(f"{name} {body[name]!r} can't be honoured here; leave it out.")
    prompt, messages = (_prompt(body), None) if url == TEXT else (None, _messages(body))
    return Asked(
        custom_id,
        url,
        _text(body, "model"),
        messages,
        prompt,
        _limit(body, url),
        _sampling(body, url, derived_seed(job_seed, custom_id)),
        _stops(body),
        bool(_kind(body, "ignore_eos", bool, False)),
        _whole(body, "n", 1, 1, 128),
    )


def _kind(body: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise BadRequest(f"{name} is {value!r}; it must be a {kind.__name__}.")
    return value


def _text(body: Mapping[str, Any], name: str) -> str | None:
    value: str | None = _kind(body, name, str, None)
    return value


def _whole(body: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value: int = _kind(body, name, int, default)
    if not low <= value <= high:
        raise BadRequest(f"{name} is {value}; it must be from {low} to {high}.")
    return value


def _real(body: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRequest(f"{name} is {value!r}; it must be a number.")
    if not low <= value <= high:
        raise BadRequest(f"{name} is {value}; it must be from {low} to {high}.")
    return float(value)


def _prompt(body: Mapping[str, Any]) -> str | tuple[int, ...]:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(type(i) is int for i in prompt):
        return tuple(prompt)
    raise BadRequest("prompt must be one string, or a list of token ids; give each text a row of its own.")


def _messages(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise BadRequest("messages must be a list of at least one object with role and content.")
    return tuple(messages)


def _limit(body: Mapping[str, Any], url: str) -> int | None:
    names = [n for n in ("max_tokens", "max_completion_tokens") if body.get(n) is not None]
    if len(names) == 2:
        raise BadRequest("max_tokens and max_completion_tokens are both given; give one.")
    if not names:
        return None if url == CHAT else 16  # the API's default for plain completions
    return _whole(body, names[0], 1, 1, 1 << 24)


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    stops: Sequence[Any] = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > 16 or not all(isinstance(s, str) and s for s in stops):
        raise BadRequest("stop must be a string, or a list of at most 16, none of them empty.")
    return tuple(stops)


def _sampling(body: Mapping[str, Any], url: str, seed: int) -> Sampling:
    given = body.get("seed")
    if given is not None:
        seed = _whole(body, "seed", 0, -(2**63), 2**63 - 1) % 2**64
    return Sampling(
        temperature=_real(body, "temperature", 1.0, 0.0, 100.0),
        top_k=_whole(body, "top_k", 0, 0, 1 << 24),
        top_p=_real(body, "top_p", 1.0, 1e-9, 1.0),
        min_p=_real(body, "min_p", 0.0, 0.0, 1.0),
        repeat_penalty=_real(body, "repeat_penalty", 1.0, 1e-3, 1e3),
        # OpenAI's penalties count over the whole text so far.
        repeat_last_n=-1,
        frequency_penalty=_real(body, "frequency_penalty", 0.0, -2.0, 2.0),
        presence_penalty=_real(body, "presence_penalty", 0.0, -2.0, 2.0),
        seed=seed,
        bias=_bias(body),
        logprobs=_logprobs(body, url),
    )


def _bias(body: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    bias = _kind(body, "logit_bias", dict, {})
    found = []
    for key in sorted(bias):
        if not key.isdecimal() or len(key) > 9:
            raise BadRequest(f"logit_bias has the key {key!r}; keys are token ids.")
        found.append((int(key), _real(bias, key, 0.0, -100.0, 100.0)))
    return tuple(found)


def _logprobs(body: Mapping[str, Any], url: str) -> int:
    """``Sampling.logprobs``: 0 none, 1 + the number of alternatives wanted."""
    if url == TEXT:
        return 0 if body.get("logprobs") is None else 1 + _whole(body, "logprobs", 0, 0, 5)
    wanted = _kind(body, "logprobs", bool, False)
    top = _whole(body, "top_logprobs", 0, 0, 19)
    if top and not wanted:
        raise BadRequest("top_logprobs needs logprobs to be true.")
    return 1 + top if wanted else 0
