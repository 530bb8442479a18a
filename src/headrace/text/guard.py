"""User text that stays user text on its way through a chat template.

A template joins its own markup and what users wrote into one string, in which ``<|im_end|>`` may be either. So
what users wrote carries guards: a character found nowhere in the request, after each character that any control
token begins with, before each one that any ends with, and around the whole. No control token can begin, end or
lie around there, however the template cuts and joins; ``Tokenizer.encode(..., guard=)`` drops the guards.
``UserText`` hides them from the template: it compares, searches, cuts and counts as the plain text would.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from headrace.errors import BadRequest

_CANDIDATES = (*range(0xFDD0, 0xFDF0), *range(0x10FFFD, 0x10F000, -1))
"""Noncharacters, meant for uses like this one, then private ones (Unicode 23.7)."""


class Guard:
    """How one request's user text is marked."""

    def __init__(self, control: Iterable[str], texts: Iterable[str]) -> None:
        """control: names of the control tokens. texts: everything that the guard character must not occur in."""
        used = set().union(*texts)
        char = next((chr(c) for c in _CANDIDATES if chr(c) not in used), None)
        if char is None:
            raise BadRequest("The messages use every private Unicode character: send ordinary text.")
        self.char = char
        names = [n for n in control if n]
        self._first, self._last = (_any_of({n[at] for n in names}) for at in (0, -1))

    def mark(self, text: str) -> UserText:
        """``text`` with guards; white space at its ends stays outside, so that trimming after joining still works."""
        core = text.strip()
        if self._first is None or self._last is None or not core:
            return UserText(text, text, self)
        at = len(text) - len(text.lstrip())
        # Two substitutions: guards are neither first nor last characters of a token.
        marked = self._last.sub(rf"{self.char}\g<0>", self._first.sub(rf"\g<0>{self.char}", core))
        return UserText(text[:at] + self.char + marked + self.char + text[at + len(core) :], text, self)

    def mark_all(self, value: Any) -> Any:
        """A JSON value with every string in it marked; keys only where they hold a character that needs it."""
        if isinstance(value, str):
            return self.mark(value)
        if isinstance(value, Mapping):
            return {self._key(k): self.mark_all(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark_all(v) for v in value]
        return value

    def _key(self, key: Any) -> Any:
        risky = isinstance(key, str) and any(p is not None and p.search(key) for p in (self._first, self._last))
        return self.mark(key) if risky else key

    def remove(self, text: str) -> str:
        return text.replace(self.char, "")


def _any_of(characters: set[str]) -> re.Pattern[str] | None:
    return re.compile(f"[{re.escape(''.join(sorted(characters)))}]") if characters else None


class UserText(str):
    """A marked string whose methods see the plain one, and give marked ones back. Joining keeps the marks."""

    plain: str
    guard: Guard

    def __new__(cls, marked: str, plain: str, guard: Guard) -> UserText:
        self = super().__new__(cls, marked)
        self.plain, self.guard = plain, guard
        return self

    def __str__(self) -> str:
        return self  # str(x), which filters call, would drop the class

    def __iter__(self) -> Iterator[str]:
        return map(self.guard.mark, self.plain)


def _plain(value: object) -> Any:
    return value.plain if isinstance(value, UserText) else value


def _through(name: str) -> Any:
    """The method ``name`` of the plain string; strings in what it returns are marked again."""
    method = getattr(str, name)

    def call(self: UserText, *args: Any, **named: Any) -> Any:
        plain = [tuple(map(_plain, a)) if isinstance(a, tuple) else _plain(a) for a in args]
        result = method(self.plain, *plain, **named)
        if isinstance(result, str):
            return self.guard.mark(result)
        return type(result)(map(self.guard.mark, result)) if isinstance(result, list | tuple) else result

    call.__name__ = name
    return call


for _name in """__contains__ __eq__ __ge__ __getitem__ __gt__ __hash__ __le__ __len__ __lt__ __mul__ __ne__ __rmul__
    capitalize casefold count endswith expandtabs find index isalnum isalpha isascii isdecimal isdigit
    islower isnumeric isspace istitle isupper lower lstrip partition removeprefix removesuffix replace rfind rindex
    rpartition rsplit rstrip split splitlines startswith strip swapcase title upper""".split():  # noqa: SIM905
    setattr(UserText, _name, _through(_name))
