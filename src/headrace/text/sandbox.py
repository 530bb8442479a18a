"""A jinja2 environment in which a hostile chat template can neither reach out, nor hang, nor fill the memory.

jinja2's immutable sandbox keeps attributes and mutation away. Here every loop round, call, filter and joined string
also spends from a budget of steps, characters and seconds, and what isn't a function of the messages (random, the
clock) isn't there.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from headrace.text.guard import UserText

WORK = 50_000_000
"""Characters and steps that one rendering may take, and as many times its input as ``PER_CHARACTER``."""
PER_CHARACTER = 50
CALL = 100
"""What a call or a round of a loop spends."""
ITEM = 20
"""What an item of a list spends."""
SECONDS = 10.0
MOST_NUMBER = 10_000
"""The largest width or count handed to a filter or string method."""

_FILTERS = """abs batch capitalize count d default dictsort e escape first float groupby indent int items join
    last length list lower map max min reject rejectattr replace reverse round safe select selectattr slice sort
    string sum title trim unique upper wordcount""".split()  # noqa: SIM905
"""What chat templates use of jinja2's filters; nothing random and nothing that scans for patterns of the web."""
_BY_PATTERN = ("title", "int", "float", "wordcount")
_NUMBER = re.compile(r"\d+")


class Exhausted(Exception):
    """The budget is spent."""


class Refused(Exception):
    """The template called raise_exception."""


class Budget:
    def __init__(self, characters: int = 0) -> None:
        """characters: of the messages; a long chat may take more than a short one."""
        self.left = WORK + PER_CHARACTER * characters
        self.end = time.monotonic() + SECONDS

    def spend(self, work: int) -> None:
        self.left -= work
        if self.left < 0 or time.monotonic() > self.end:
            raise Exhausted


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}``, a mark of training code: its body, as if unmarked."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Counting(NodeTransformer):
    """Loops, ``~`` and everything that builds a container pass through filters that spend."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filter(node.iter, "counted_")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes), "concat_")

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "built_")

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx == "store" else _filter(node, "built_")


def _filter(value: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno or 1)


class _Namespace(Namespace):
    def __repr__(self) -> str:
        return "<namespace>"  # its values may hold each other many times over


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles one template. ``budget`` is set anew for each rendering, so a Sandbox serves one thread at a time."""

    intercepted_binops = frozenset(["*", "+", "%", "**"])

    def __init__(self) -> None:
        self.budget = Budget()
        # Not optimised: folding constants would work before there is a budget. Finalised is every value written.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], optimized=False,
            finalize=self._built,
        )  # fmt: skip
        own = {"tojson": self._tojson, "counted_": self._counted, "concat_": self._concat, "built_": self._built}
        self.filters = {**{name: self._charged(name, self.filters[name]) for name in _FILTERS}, **own}
        self.globals = {
            "range": self.globals["range"], "dict": dict, "namespace": _Namespace, "raise_exception": _raise,
        }  # fmt: skip

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Counting().visit(tree)
        return tree

    def call(self, __context: Context, __obj: Any, *args: Any, **named: Any) -> Any:
        self.budget.spend(CALL)
        name, owner = getattr(__obj, "__name__", ""), getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            self._check(name, (owner, *args), named)
        return self._built(super().call(__context, __obj, *args, **named))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, int) and isinstance(right, int)
        if numbers and (max(left.bit_length(), right.bit_length()) > 256 or (operator == "**" and abs(right) > 64)):
            raise SecurityError("a number beyond any use")
        if operator == "%" and isinstance(left, str):
            self._check("format", (left, right), {})
        work = _size(left) + _size(right)
        if operator == "*" and not numbers:
            work *= max([1, *(int(v) for v in (left, right) if isinstance(v, int | float))])
        self.budget.spend(work + 1)
        return self._built(super().call_binop(context, operator, left, right))

    def _built(self, value: Any) -> Any:
        """``value``, after spending what it would take to compare or write it out, shared parts counted each time."""
        self.budget.spend(_weight(value, {}))
        return value

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        safe = super().wrap_str_format(value)
        if safe is None:
            return None

        def checked(*args: Any, **named: Any) -> str:
            self._check("format", (value.__self__, *args), named)
            return safe(*args, **named)

        return checked

    def _check(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Spend what a filter or string method may write, before it does."""
        values = [*args, *named.values()]
        for v in values:
            if isinstance(v, int) and abs(v) > MOST_NUMBER:
                raise SecurityError(f"{name} with a number as large as {v}")
        if name == "format" and any(int(n[:9]) > MOST_NUMBER for n in _NUMBER.findall(str(args[0]))):
            raise SecurityError("a format wider than any text")
        self.budget.spend(1 + sum(map(_size, values)) + _growth(name, values))

    def _charged(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        takes = getattr(function, "jinja_pass_arg", None) is not None

        @functools.wraps(function)
        def run(*args: Any, **named: Any) -> Any:
            plain = list(args[1:] if takes else args)
            if isinstance(plain[0], Iterable) and not isinstance(plain[0], str | list | tuple | dict | Undefined):
                plain[0] = list(self._counted(plain[0]))  # a range, or a generator such as map makes
            self._check(name, tuple(plain), named)
            user = plain[0] if name in _BY_PATTERN and isinstance(plain[0], UserText) else None
            if user is not None:  # guards aren't for their patterns
                out = function(user.plain, *plain[1:], **named)
                return self._built(user.guard.mark(out) if isinstance(out, str) else out)
            return self._built(function(*args[:1], *plain, **named) if takes else function(*plain, **named))

        return run

    def _counted(self, items: Iterable[Any]) -> Iterable[Any]:
        return _Counted(items, self.budget)

    def _concat(self, parts: list[Any]) -> str:
        return "".join(map(str, self._built(parts)))

    def _tojson(
        self, value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
        sort_keys: bool = False,
    ) -> str:  # fmt: skip
        self._check("tojson", (indent,), {})
        out = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        self.budget.spend(len(out))
        return out


class _Counted:
    """Items that spend as they pass. Known lengths stay known, because templates ask for loop.length."""

    def __init__(self, items: Iterable[Any], budget: Budget) -> None:
        self._items, self._budget = items, budget

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._budget.spend(CALL)
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # TypeError tells jinja2 to count by itself


def _raise(message: Any) -> str:
    raise Refused(str(message))


def _growth(name: str, values: list[Any]) -> int:
    """Characters that a call writes beyond its arguments' own. ``values``: the string or list, then the rest."""
    head, rest = values[0], values[1:]
    if name == "replace" and len(rest) > 1:
        return str(head).count(str(rest[0])) * _size(rest[1]) if str(rest[0]) else (_size(head) + 1) * _size(rest[1])
    if name == "join":
        items = next((v for v in values if isinstance(v, list | tuple)), ())
        between = max((_size(v) for v in values if isinstance(v, str)), default=0)
        return len(items) * between + sum(map(_size, items))
    if name == "indent":
        return (str(head).count("\n") + 1) * max((v if isinstance(v, int) else _size(v) for v in rest), default=4)
    if name == "expandtabs":
        return str(head).count("\t") * max((v for v in rest if isinstance(v, int)), default=8)
    return 0


def _size(value: Any) -> int:
    if isinstance(value, list | tuple | dict):
        return ITEM * len(value)
    return len(value) if isinstance(value, str | range) else 0


def _weight(value: Any, known: dict[int, int]) -> int:
    """Characters and items of a value written out. ``known`` by id: lists that hold lists twice may be vast."""
    if isinstance(value, str):
        return len(value)
    if not isinstance(value, list | tuple | dict):
        return ITEM
    weight = known.get(id(value))
    if weight is None:
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        weight = known[id(value)] = ITEM + sum(_weight(v, known) for v in parts)
    return weight
