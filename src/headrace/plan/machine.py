"""A machine as data: tiers, links, compute rates. Frozen, JSON in and out, nothing measured here but by ``probe``.

Units everywhere: bytes, seconds, bytes/s, FLOP/s (a multiply-add is two). Tiers are rows of data, so a device,
host memory, CXL memory and a disk are told apart by their numbers and links only.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from headrace.errors import BadFile, Unsupported

T = TypeVar("T")
VERSION = 1


@dataclass(frozen=True)
class Tier:
    """A place for bytes. ``read``/``write``: rates of the medium itself (memory: what a kernel streams at)."""

    name: str
    capacity: int
    read: float
    write: float
    reserved: int = 0
    """Bytes of the capacity that are not ours: interpreter, libraries, driver."""


@dataclass(frozen=True)
class Link:
    """One direction between two tiers. Links naming the same ``resource`` share it: their times add."""

    src: str
    dst: str
    rate: float
    latency: float = 0.0
    resource: str = ""
    staged: float = 0.0
    """Rate from memory that isn't pinned (0: no difference). Only other engines' schedules use it."""
    taken: float = 0.0
    """Seconds of computing at ``dst`` that a byte takes: somebody copies it (a virtual machine's disk is another
    thread's work on the same cores)."""

    @property
    def shared(self) -> str:
        return self.resource or f"{self.src}>{self.dst}"


@dataclass(frozen=True)
class Compute:
    """Arithmetic at a tier. ``matmul``: (rows, FLOP/s), rows ascending; empty: this place only attends.

    Between points the rate is interpolated over log(rows), outside it is the end point's. ``attend``: FLOP/s of
    attention for prompts, ``attend_one`` when each row has its own cache (decode); 0: it can't attend.
    ``overhead``: seconds a (layer, run) step costs beside arithmetic. What is known of more (``probe`` measures it):
    ``formats`` and ``attends``: curves by storage format and attention rates by KV bits ("8/4"), where they differ;
    ``linear``: seconds a matrix product costs beside arithmetic; ``value``: seconds an f32 value takes in norms and
    activations; ``row``: seconds the loop takes for a row of a pass.
    """

    tier: str
    matmul: tuple[tuple[int, float], ...] = ()
    attend: float = 0.0
    attend_one: float = 0.0
    overhead: float = 0.0
    formats: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    attends: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    linear: float = 0.0
    value: float = 0.0
    row: float = 0.0

    def attention(self, bits: str, prompt: bool) -> float:
        """FLOP/s of attention over a cache of these K/V bits."""
        prompts, nexts = self.attends.get(bits, (self.attend, self.attend_one))
        return prompts if prompt else nexts

    def rate(self, rows: float, fmt: str = "") -> float:
        """FLOP/s of a matrix product with this many rows."""
        points = self.formats.get(fmt, self.matmul)
        if rows <= points[0][0]:
            return points[0][1]
        for (r0, f0), (r1, f1) in itertools.pairwise(points):
            if rows <= r1:
                return f0 + (f1 - f0) * (math.log(rows / r0) / math.log(r1 / r0))
        return points[-1][1]


@dataclass(frozen=True)
class Machine:
    """Tiers from near to far, links, computes (the first is the main one), and the link to the next node."""

    name: str
    tiers: tuple[Tier, ...]
    links: tuple[Link, ...]
    computes: tuple[Compute, ...]
    network: Link | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each number comes from."""

    def __post_init__(self) -> None:
        names = [t.name for t in self.tiers]
        if len(set(names)) != len(names) or not names:
            raise Unsupported(f"machine {self.name!r}: tier names must be present and unlike, got {names}.")
        for link in self.links:
            if link.src not in names or link.dst not in names:
                raise Unsupported(f"machine {self.name!r}: link {link.src}>{link.dst} names no known tier.")
            _positive(self.name, f"link {link.src}>{link.dst} rate", link.rate)
        for tier in self.tiers:
            _positive(self.name, f"tier {tier.name} read", tier.read)
            _positive(self.name, f"tier {tier.name} write", tier.write)
            if tier.capacity < 0 or tier.reserved < 0:
                raise Unsupported(f"machine {self.name!r}: tier {tier.name} has a negative size.")
        if not self.computes or not self.computes[0].matmul:
            raise Unsupported(f"machine {self.name!r}: no place computes; give one with matmul rates.")
        for compute in self.computes:
            if compute.tier not in names:
                raise Unsupported(f"machine {self.name!r}: computes at {compute.tier!r}, which is no tier.")
            for attends in filter(None, (compute.attend, compute.attend_one)):
                _positive(self.name, f"attention at {compute.tier}", attends)
            for curve in (compute.matmul, *compute.formats.values()):
                rows = [r for r, _ in curve]
                if rows != sorted(set(rows)) or any(f <= 0 for _, f in curve):
                    raise Unsupported(f"machine {self.name!r}: matmul rows at {compute.tier} must ascend.")

    def tier(self, name: str) -> Tier:
        found = next((t for t in self.tiers if t.name == name), None)
        if found is None:
            raise Unsupported(f"machine {self.name!r} has no tier {name!r}; it has {[t.name for t in self.tiers]}.")
        return found

    def compute(self, tier: str) -> Compute | None:
        return next((c for c in self.computes if c.tier == tier), None)

    @cached_property
    def _paths(self) -> dict[tuple[str, str], tuple[Link, ...]]:
        paths: dict[tuple[str, str], tuple[Link, ...]] = {}
        for start in self.tiers:
            paths[start.name, start.name] = ()
            queue = [start.name]
            for here in queue:
                for link in self.links:
                    if link.src == here and (start.name, link.dst) not in paths:
                        paths[start.name, link.dst] = (*paths[start.name, here], link)
                        queue.append(link.dst)
        return paths

    def path(self, src: str, dst: str) -> tuple[Link, ...]:
        """The hops from one tier to another, fewest first found; empty when they are the same."""
        try:
            return self._paths[src, dst]
        except KeyError:
            raise Unsupported(f"machine {self.name!r}: no way from tier {src!r} to {dst!r}.") from None

    def connected(self, src: str, dst: str) -> bool:
        return (src, dst) in self._paths

    def with_tier(self, name: str, **changes: Any) -> Machine:
        """The same machine with some fields of one tier changed."""
        self.tier(name)
        tiers = tuple(dataclasses.replace(t, **changes) if t.name == name else t for t in self.tiers)
        return dataclasses.replace(self, tiers=tiers)

    def faster(self, tier: str, factor: float) -> Machine:
        """The same machine with a tier, and every link from or to it, ``factor`` times as fast."""
        t = self.tier(tier)
        links = tuple(dataclasses.replace(k, rate=k.rate * factor) if tier in (k.src, k.dst) else k for k in self.links)
        changed = self.with_tier(tier, read=t.read * factor, write=t.write * factor)
        return dataclasses.replace(changed, links=links)

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """Raises BadFile when the text is no machine of this version."""
        data = read_object(text, "machine", VERSION)
        made = dict(data)
        for name, kind in (("tiers", Tier), ("links", Link), ("computes", Compute)):
            made[name] = tuple(build(kind, x, f"machine {name}") for x in items(data, name, "machine"))
        try:
            made["computes"] = tuple(
                dataclasses.replace(
                    c,
                    matmul=_curve(c.matmul) if c.matmul else (),
                    formats={name: _curve(points) for name, points in c.formats.items()},
                    attends={bits: (_number(a), _number(b)) for bits, (a, b) in c.attends.items()},
                )
                for c in made["computes"]
            )
        except (TypeError, ValueError, AttributeError) as error:
            raise BadFile(f"this machine's rates can't be read: {error}.") from None
        if data.get("network") is not None:
            made["network"] = build(Link, data["network"], "machine network")
        return build(cls, made, "machine")


KINDS: Mapping[str, tuple[Any, str]] = {
    "str": (str, "text"), "int": (int, "a whole number, 0 or more"), "float": ((int, float), "a number, 0 or more"),
    "Mapping[str, str]": (dict, "an object"),
}  # fmt: skip
"""Annotation of a field -> what JSON may give it, and that in words."""


LEAST, MOST = 1e-18, 1e24
"""Of rates and sizes: arithmetic with a few of them stays finite."""


def _right(value: Any, kind: str) -> bool:
    if not isinstance(value, KINDS[kind][0]) or isinstance(value, bool):
        return False
    return not isinstance(value, int | float) or 0 <= value <= MOST


def _number(value: Any) -> float:
    if not _right(value, "float") or value < LEAST:
        raise ValueError(f"{value!r:.40} is no rate")
    return float(value)


def _curve(points: Any) -> tuple[tuple[int, float], ...]:
    if not points or not all(_right(r, "int") and r for r, _ in points):
        raise ValueError("a curve is a list of [rows, rate], rows whole numbers of 1 or more")
    return tuple((r, _number(f)) for r, f in points)


def _positive(machine: str, what: str, value: float) -> None:
    if not (isinstance(value, int | float) and LEAST <= value <= MOST):
        raise Unsupported(f"machine {machine!r}: {what} must be a positive number, got {value!r}.")


def read_object(text: str, what: str, version: int) -> dict[str, Any]:
    """A JSON object of ours without its version; BadFile with a sentence otherwise."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadFile(f"this {what} is no JSON: {error}.") from None
    if not isinstance(data, dict):
        raise BadFile(f"this {what} is JSON, but no object.")
    if data.pop("version", None) != version:
        raise BadFile(f"this {what} is of another version; this program reads version {version}.")
    return data


def items(data: Mapping[str, Any], name: str, what: str) -> list[Any]:
    value = data.get(name)
    if not isinstance(value, list):
        raise BadFile(f"this {what} lacks a list {name!r}.")
    return value


def build(kind: type[T], data: Any, what: str) -> T:
    """A dataclass from a JSON object; unknown and missing fields are refused by name."""
    if not isinstance(data, Mapping):
        raise BadFile(f"{what}: expected an object, got {type(data).__name__}.")
    known = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(known))
    needed = [n for n, f in known.items() if f.default is f.default_factory is dataclasses.MISSING]
    missing = sorted(set(needed) - set(data))
    if unknown or missing:
        raise BadFile(f"{what}: unknown fields {unknown}, missing fields {missing}.")
    for name, value in data.items():
        wants = str(known[name].type)
        if wants in KINDS and not _right(value, wants):
            raise BadFile(f"{what}: {name} can't be {value!r:.40}; write {KINDS[wants][1]}.")
    try:
        return kind(**data)
    except (TypeError, ValueError) as error:
        raise BadFile(f"{what}: {error}.") from None
