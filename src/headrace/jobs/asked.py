"""One row of an OpenAI batch file: checked, and turned into what the engine is asked. Nothing is ignored.

Format: platform.openai.com/docs/api-reference/batch (``custom_id``, ``method``, ``url``, ``body``). A row that can't
be honoured raises BadRequest with a sentence that names the field; it becomes an error row, not the job's end.
"""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import BadRequest
from headrace.run.types import Sampling

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"

_COMMON = frozenset(
    """model max_tokens temperature top_p n stop seed frequency_penalty presence_penalty logit_bias logprobs user stream
    top_k min_p repeat_penalty ignore_eos""".split()  # noqa: SIM905
)
_OWN = {
    CHAT: _COMMON | {"messages", "max_completion_tokens", "top_logprobs", "response_format"},
    TEXT: _COMMON | {"prompt", "echo", "best_of", "suffix"},
}
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "stream": (False, None), "response_format": ({"type": "text"}, None), "echo": (False, None), "suffix": (None, ""),
}  # fmt: skip
"""Fields known to us of which only the value that changes nothing can be honoured."""
_KINDS = {str: "a string", int: "a whole number", bool: "true or false", dict: "an object"}

_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = _brief.maxlong = 60


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
    """A line as a JSON object (RFC 8259, in UTF-8, no name twice); BadRequest when it isn't one."""
    try:
        row = json.loads(line.decode("utf-8-sig"), parse_constant=_no_constant, object_pairs_hook=_object)
    except (ValueError, RecursionError) as e:
        raise BadRequest(f"The line is no valid JSON ({e}).") from None
    if not isinstance(row, dict):
        raise BadRequest(f"The line is a JSON {type(row).__name__}, not an object.")
    return row


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{shown(next(n for n in names if names.count(n) > 1))} stands twice in an object")
    return found


def shown(value: Any) -> str:
    """A value out of a row, fit for a message: short, however long or deep it is."""
    return _brief.repr(value)


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
    if unknown := sorted(set(row) - {"custom_id", "method", "url", "body"}):
        raise BadRequest(f"The row has a field {shown(unknown[0])} that is not known; leave it out.")
    if row.get("method") != "POST":
        raise BadRequest(f"method is {shown(row.get('method'))}; it must be 'POST'.")
    url = row.get("url")
    if not isinstance(url, str) or url not in _OWN:
        raise BadRequest(f"url is {shown(url)}; it must be {CHAT} or {TEXT}.")
    body = row.get("body")
    if not isinstance(body, dict):
        raise BadRequest("body must be an object.")
    if unknown := sorted(set(body) - _OWN[url]):
        raise BadRequest(f"body has a field {shown(unknown[0])} that is not known for {url}; leave it out.")
    for name, good in _ONLY.items():
        if name in body and not any(type(body[name]) is type(g) and body[name] == g for g in good):
            raise BadRequest(f"{name} {shown(body[name])} can't be honoured here; leave it out.")
    _text(body, "user")  # a mark for the provider's books: it changes nothing, but must be what it says
    choices = _whole(body, "n", 1, 1, 128)
    if _whole(body, "best_of", choices, 1, 128) != choices:
        raise BadRequest(f"best_of is {body['best_of']}; it can only be the same as n here.")
    prompt, messages = (_prompt(body), None) if url == TEXT else (None, _messages(body))
    model, limit = _text(body, "model"), _limit(body, url)
    sampling = _sampling(body, url, derived_seed(job_seed, custom_id))
    stops, ignore_eos = _stops(body), bool(_kind(body, "ignore_eos", bool, False))
    return Asked(custom_id, url, model, messages, prompt, limit, sampling, stops, ignore_eos, choices)


def _kind(body: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise BadRequest(f"{name} is {shown(value)}; it must be {_KINDS[kind]}.")
    return value


def _text(body: Mapping[str, Any], name: str) -> str | None:
    return _kind(body, name, str, None)  # type: ignore[no-any-return]


def _whole(body: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value: int = _kind(body, name, int, default)
    if not low <= value <= high:
        raise BadRequest(f"{name} is {shown(value)}; it must be from {low} to {high}.")
    return value


def _real(body: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value := _float(value)):
        raise BadRequest(f"{name} is {shown(value)}; it must be a number.")
    if not low <= value <= high:
        raise BadRequest(f"{name} is {shown(value)}; it must be from {low:g} to {high:g}.")
    return float(value)


def _float(value: float) -> float:
    """JSON's whole numbers have no limit, floating ones do."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _prompt(body: Mapping[str, Any]) -> str | tuple[int, ...]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        return str(prompt[0])
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
    found: dict[int, float] = {}
    for key in bias:
        if not (key.isascii() and key.isdecimal()) or len(key) > 9 or (key[0] == "0" and len(key) > 1):
            raise BadRequest(f"logit_bias has the key {shown(key)}; keys are token ids.")
        found[int(key)] = _real(bias, key, 0.0, -100.0, 100.0)
    return tuple(sorted(found.items()))


def _logprobs(body: Mapping[str, Any], url: str) -> int:
    """``Sampling.logprobs``: 0 none, 1 + the number of alternatives wanted."""
    if url == TEXT:
        return 0 if body.get("logprobs") is None else 1 + _whole(body, "logprobs", 0, 0, 5)
    wanted = _kind(body, "logprobs", bool, False)
    top = _whole(body, "top_logprobs", 0, 0, 20)
    if top and not wanted:
        raise BadRequest("top_logprobs needs logprobs to be true.")
    return 1 + top if wanted else 0
