"""What ranks say to each other before, beside and after the work: who they are, what differs, why it ends.

These messages are rare, so their body is JSON: named fields with checked types, at most 64 KiB, never code.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

from headrace.cluster.wire import Data, open_message, with_header
from headrace.errors import BadMessage
from headrace.run.types import PROTOCOL

MOST = 64 << 10
"""Bytes of a control message's body."""
PART = 2 << 20
"""Bytes of a model file in one message, at most."""


@dataclass(frozen=True)
class Begin:
    """Head to each rank: the model is to be had, say hello."""


@dataclass(frozen=True)
class Hello:
    """Each rank to the head: what it would run, and on what.

    digest: of the model file, draft: of the draft model's ("" without). cpus: ids of those it may use. lacks: files it
    is shipped, 1 the model's and 2 the draft model's. machine: its constants as JSON, memory and limited: as in
    ``sharing.Rank``.
    """

    version: str
    digest: str
    draft: str
    kv_bits: tuple[int, ...]
    split: str
    cpus: tuple[int, ...]
    lacks: int = 0
    machine: str = ""
    memory: int = 0
    limited: int = 0


@dataclass(frozen=True)
class Plan:
    """Head to each rank: edges [first, end) of every rank's layers, targets' ranks first, and threads of each rank.

    pages: of the cache; draft_pages: of the drafter's. rows: most in a run. targets: how many of the ranks hold the
    target model. epoch: rises with every plan, so that nothing of an earlier one is taken for this one's. givers: whom
    each rank asks for its layers, itself where it has them. runs: most that may be at a rank; sequences: most at a
    time; together: rows that each rank takes in one go over its layers, where these stream.
    """

    firsts: tuple[int, ...]
    ends: tuple[int, ...]
    threads: tuple[int, ...]
    pages: int
    draft_pages: int
    rows: int
    targets: int
    epoch: int
    givers: tuple[int, ...] = ()
    runs: int = 1
    sequences: int = 1
    together: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ready:
    """A rank to the head: its layers are loaded. nbytes: of weights it holds."""

    nbytes: int


@dataclass(frozen=True)
class Stop:
    """Head to each rank: leave, with this exit status."""

    status: int


@dataclass(frozen=True)
class Failure:
    """A rank to the head: what went wrong there, as a sentence."""

    text: str


@dataclass(frozen=True)
class Ping:
    """Nothing, but the sender is alive."""


@dataclass(frozen=True)
class Look:
    """Head to each rank: tell what you have seen (``run.trace``)."""


@dataclass(frozen=True)
class Seen:
    """A rank to the head, in parts. now: its clock. busy: stage and time computed so far, hops: stage and bytes sent
    to it so far, in turns. spans, visits: the fields of those since the last time, one after the other. more: parts
    that follow. Times in microseconds.
    """

    now: int
    busy: tuple[int, ...]
    hops: tuple[int, ...]
    spans: tuple[int, ...]
    visits: tuple[int, ...]
    more: int


@dataclass(frozen=True)
class Want:
    """A rank asks for parts of a model's files (``cluster/ship.py``). which: the model (0) or the draft model (1).

    parts: file, offset and bytes of each, in turns; none: what files there are.
    """

    which: int
    parts: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """What files a model is made of. names: with "/" between. heads: bytes of each that opening it reads; early:
    file, offset and bytes, in turns, of what else is read then. digest: of the whole."""

    kind: str
    names: str
    sizes: tuple[int, ...]
    heads: tuple[int, ...]
    early: tuple[int, ...]
    digest: str


@dataclass(frozen=True)
class Part:
    """A part of a model file. sum: blake2b-128 of the data."""

    which: int
    file: int
    offset: int
    sum: bytes
    data: Data


Control: TypeAlias = Begin | Hello | Plan | Ready | Stop | Failure | Ping | Look | Seen | Want | Manifest | Part

_KINDS: dict[int, type[Any]] = {
    16: Hello, 17: Plan, 18: Ready, 19: Stop, 20: Failure, 21: Ping, 22: Begin, 23: Look, 24: Seen, 25: Want,
    26: Manifest, 27: Part,
}  # fmt: skip
_PART = struct.Struct("<BIQ16s")
_NUMBERS = {kind: number for number, kind in _KINDS.items()}


def pack(message: Control) -> bytearray:
    """A control message as bytes. A text that is too long is cut."""
    if isinstance(message, Part):
        fixed = _PART.pack(message.which, message.file, message.offset, message.sum)
        return with_header(27, PROTOCOL, (fixed, message.data))
    if isinstance(message, Failure) and len(message.text) > MOST // 8:
        message = Failure(message.text[: MOST // 8])
    body = json.dumps(asdict(message)).encode()
    return with_header(_NUMBERS[type(message)], PROTOCOL, (body,))


def unpack(data: Data) -> Control:
    """The message in ``data``; BadMessage says what is wrong with it."""
    kind, reader = open_message(data, PROTOCOL)
    made = _KINDS.get(kind)
    if made is None:
        raise BadMessage(f"a control message is of the unknown kind {kind}")
    if made is Part:
        which, number, offset, digest = reader.take(_PART)
        if reader.end - reader.at > PART:
            raise BadMessage(f"a part of a file has {reader.end - reader.at} bytes, at most {PART} are allowed")
        return Part(which, number, offset, digest, memoryview(reader.data)[reader.at :])
    body = bytes(reader.data[reader.at :])
    if len(body) > MOST:
        raise BadMessage(f"a {made.__name__} message has {len(body)} bytes, at most {MOST} are allowed")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise BadMessage(f"a {made.__name__} message is no JSON") from None
    names = [field.name for field in fields(made)]
    if not isinstance(found, dict) or sorted(found) != sorted(names):
        raise BadMessage(f"a {made.__name__} message has other fields than {', '.join(names)}")
    values = {f.name: _CHECKS[str(f.type)](f"{made.__name__}.{f.name}", found[f.name]) for f in fields(made)}
    message: Control = made(**values)
    return message


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise BadMessage(f"{name} is no text")
    return value


def _whole(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise BadMessage(f"{name} is no whole number from 0 to 2^63 - 1")
    return value


def _wholes(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise BadMessage(f"{name} is no list")
    return tuple(_whole(name, item) for item in value)


_CHECKS: dict[str, Callable[[str, object], Any]] = {"str": _text, "int": _whole, "tuple[int, ...]": _wholes}


_TOLD: Sequence[tuple[str, str, str]] = (
    ("version", "runs Headrace {1} and the head runs {0}", "install the same version on every machine"),
    ("digest", "has another model file than the head", "give every machine the same file"),
    ("draft", "has another draft model than the head", "give every machine the same file"),
    ("kv_bits", "keeps K and V in {1} bits and the head in {0}", "give every rank the same --kv-bits"),
    ("split", "was given the layer split {1!r} and the head {0!r}", "give every rank the same --layer-split"),
)


def difference(head: Hello, other: Hello, who: str) -> str | None:
    """What keeps two ranks from working together, as a sentence with a remedy; None when nothing does."""
    for name, says, remedy in _TOLD:
        mine, theirs = getattr(head, name), getattr(other, name)
        if mine != theirs:
            return f"{who} {says.format(_shown(mine), _shown(theirs))}; {remedy}."
    return None


def _shown(value: object) -> object:
    return "/".join(map(str, value)) if isinstance(value, tuple) else value


def threads_each(hellos: Sequence[Hello], hosts: Sequence[str], asked: Sequence[int]) -> tuple[int, ...]:
    """Compute threads of each rank: what was asked (one number for all, or one each; 0: not said), else its part of
    the CPUs it may use, divided among the ranks of its host that may use them too."""
    given = list(asked) * len(hellos) if len(asked) == 1 else list(asked)
    users: dict[tuple[str, int], int] = {}
    for hello, host in zip(hellos, hosts, strict=True):
        for cpu in hello.cpus:
            users[host, cpu] = users.get((host, cpu), 0) + 1
    parts = [
        max(1, int(sum(1 / users[host, cpu] for cpu in hello.cpus) + 1e-9))
        for hello, host in zip(hellos, hosts, strict=True)
    ]
    return tuple(g or p for g, p in zip(given, parts, strict=True))
