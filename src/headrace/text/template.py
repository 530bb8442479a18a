"""Chat templates: messages to a prompt, by the model's own jinja2 template in a sandbox."""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.errors import BadFile, BadRequest, Unsupported
from headrace.text.guard import Guard

if TYPE_CHECKING:
    from headrace.text.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "thinking")
"""What a message may have. "content": a string, None, or a list of {"type": "text", "text": ...}."""
_MOST_SOURCE = 1 << 20
_DEPTH = 64

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TURNS = (
    "{{ bos_token }}{% for message in messages %}{% set role = message['role'] %}"
    "{{ '<start_of_turn>' + ('model' if role == 'assistant' else 'user' if role == 'system' else role) + '\n' "
    "+ message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
FALLBACKS = {
    "chatml": (("<|im_start|>", "<|im_end|>"), _CHATML),
    "turns": (("<start_of_turn>", "<end_of_turn>"), _TURNS),
}
"""Formats for models without a template whose vocabulary has the tokens of one (ChatML; Gemma's turns)."""


@dataclass(frozen=True)
class Rendered:
    """A prompt. ``guard`` marks what users wrote in ``marked``; ``text`` is the prompt as one reads it."""

    marked: str
    guard: str

    @property
    def text(self) -> str:
        return self.marked.replace(self.guard, "")


class ChatTemplate:
    """A model's chat template. Safe to use from several threads, which take turns."""

    def __init__(self, tokenizer: Tokenizer, source: str | None = None) -> None:
        """source: a template to use instead of the model's. ``origin`` tells which it is: "given", "model", or one
        of ``FALLBACKS``. Raises BadFile (no valid template) or Unsupported (the model has none).
        """
        self._tokenizer = tokenizer
        self.origin, self.source = _choose(tokenizer, source)
        if len(self.source) > _MOST_SOURCE:
            raise BadFile(f"The chat template has {len(self.source):,} characters; at most {_MOST_SOURCE:,} are read.")
        self._lock = threading.Lock()
        special = {"bos": tokenizer.bos, "eos": tokenizer.eos, "unk": tokenizer.unk, "pad": tokenizer.pad}
        self._names = {
            f"{name}_token": "" if i is None else tokenizer.decode([i], special=True) for name, i in special.items()
        }
        # Imported here: a run without a chat needs no jinja2.
        from jinja2.exceptions import TemplateError

        from headrace.text.sandbox import Sandbox

        self._sandbox = Sandbox()
        try:
            self._compiled = self._sandbox.from_string(self.source)
        except (TemplateError, RecursionError, SyntaxError, MemoryError, ValueError, OverflowError) as e:
            line = getattr(e, "lineno", None)
            raise BadFile(
                f"The chat template isn't valid{f' at line {line}' if line else ''} ({_short(e)}); give another one."
            ) from None

    def encode(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Ids of the prompt; options as in ``render``. Control tokens come from the template, never from messages."""
        prompt = self.render(messages, **options)
        return self._tokenizer.encode(prompt.marked, special=True, guard=prompt.guard)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None,
        reply: bool = True, today: datetime.date | None = None, variables: Mapping[str, Any] | None = None,
    ) -> Rendered:  # fmt: skip
        """The prompt for ``messages`` (``KEYS``; roles ``ROLES``).

        reply: end with the beginning of an answer. today: for templates that write the date; without it they see no
        clock, because a prompt is a function of its messages. variables: what else the template reads, such as
        ``enable_thinking``. Raises BadRequest (messages invalid or refused by the template) or BadFile (the template
        does endless work or something forbidden).
        """
        checked = [_message(m, i) for i, m in enumerate(_listed(messages, "messages"))]
        if not checked:
            raise BadRequest("There are no messages: give at least one.")
        extra = {"tools": _listed(tools, "tools") if tools else None, **(variables or {})}
        guard = Guard(self._tokenizer.vocab.control, _texts([checked, extra, self.source]))
        names = {**guard.mark_all(extra), **self._names, "add_generation_prompt": reply}
        names["messages"] = [{**guard.mark_all(m), "role": m["role"]} for m in checked]
        if today is not None:
            names["strftime_now"] = today.strftime
        size = sum(map(len, _texts([checked, extra])))
        return Rendered(self._run(names, guard, size), guard.char)

    def _run(self, names: Mapping[str, Any], guard: Guard, size: int) -> str:
        from jinja2.exceptions import SecurityError, UndefinedError

        from headrace.text.sandbox import Budget, Exhausted, Refused

        out: list[str] = []
        what = "The chat template can't render these messages"
        try:
            with self._lock:
                budget = self._sandbox.budget = Budget(size)
                for part in self._compiled.generate(names):
                    budget.spend(str.__len__(part))
                    out.append(part)
        except Refused as e:
            raise BadRequest(f"The model's chat template refuses these messages: {guard.remove(_short(e))}") from None
        except (SecurityError, Exhausted, RecursionError, MemoryError, OverflowError) as e:
            why = _short(e) or "endless work"
            raise BadFile(f"The chat template does what it may not ({why}); give another one.") from None
        except UndefinedError as e:
            hint = "pass today's date" if "strftime_now" in str(e) else "change them or give another template"
            raise BadRequest(f"{what} ({_short(e)}): {hint}.") from None
        except Exception as e:  # a template may fail in any way that Python can
            raise BadRequest(f"{what} ({guard.remove(_short(e))}): change them or give another template.") from None
        return "".join(out)


def _choose(tokenizer: Tokenizer, source: str | None) -> tuple[str, str]:
    if source is not None:
        return "given", source
    if tokenizer.template:
        return "model", tokenizer.template
    for name, (tokens, text) in FALLBACKS.items():
        if all(t in tokenizer.vocab.control for t in tokens):
            return name, text
    raise Unsupported("The model has no chat template: give one, or send plain text (--raw).")


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _listed(value: Any, what: str) -> list[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise BadRequest(f"{what} is a {type(value).__name__}, not a list.")
    if not all(isinstance(v, Mapping) for v in value):
        raise BadRequest(f"{what} holds something that is no object.")
    return list(value)


def _message(message: Mapping[str, Any], at: int) -> dict[str, Any]:
    where = f"Message {at + 1}"
    unknown = [k for k in message if k not in KEYS]
    if unknown:
        raise BadRequest(f"{where} has {unknown[0]!r}, which Headrace doesn't know; it knows {', '.join(KEYS)}.")
    role = message.get("role")
    if role not in ROLES:
        raise BadRequest(f"{where} has the role {role!r}; use one of {', '.join(ROLES)}.")
    out = {"role": str(role), **{k: v for k, v in message.items() if k not in ("role", "content")}}
    out["content"] = _content(message.get("content"), where)
    calls = message.get("tool_calls")
    if calls is None:
        out.pop("tool_calls", None)
        if message.get("content") is None:
            raise BadRequest(f"{where} has no content.")
    else:
        out["tool_calls"] = [_call(c) for c in _listed(calls, f"{where}: tool_calls")]
    for key in ("name", "tool_call_id", "reasoning_content", "thinking"):
        if not isinstance(out.get(key, ""), str):
            raise BadRequest(f"{where}: {key} is no string.")
    return out


def _content(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = _listed(content, f"{where}: content")
    for part in parts:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRequest(f"{where} has a part of type {part.get('type')!r}; this model reads text parts only.")
    return "\n".join(part["text"] for part in parts)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Templates want a call's arguments as an object; clients send them as JSON text."""
    function = call.get("function")
    if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
        with suppress(ValueError, RecursionError):
            if isinstance(arguments := json.loads(function["arguments"]), dict):
                return {**call, "function": {**function, "arguments": arguments}}
    return dict(call)


def _texts(value: Any, depth: int = 0) -> Iterator[str]:
    """Every string in a JSON value."""
    if depth > _DEPTH:
        raise BadRequest(f"The messages or tools are nested deeper than {_DEPTH} levels.")
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for k, v in value.items():
            yield str(k)
            yield from _texts(v, depth + 1)
    elif isinstance(value, list | tuple):
        for v in value:
            yield from _texts(v, depth + 1)
