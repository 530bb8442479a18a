"""The Plan: the frozen choice of where everything lies and in what order it is computed. Pure data, JSON both ways."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from headrace.errors import BadFile, Unsupported
from headrace.plan.machine import build, items, read_object

VERSION = 1


@dataclass(frozen=True, order=True)
class Place:
    """Of one layer: the tiers its weights live in, it is computed at, its cache lives in, and its next tokens
    attend at (where the cache lies: the query goes there and the result back; else the cache is fetched)."""

    weights: str
    compute: str
    kv: str
    attend: str

    @property
    def streams(self) -> bool:
        return self.weights != self.compute


PLAIN = Place("host", "host", "host", "host")


@dataclass(frozen=True)
class Plan:
    """One step of the loop is one layer of one run; a block of ``runs`` runs passes a layer while it is held.

    ``rows``: sequences in a run (FlexGen's gpu batch size); ``runs``: runs in a block; ``chunk``: prompt tokens a
    sequence contributes to one pass; ``places``: one for each layer of the model, in order; ``activations``: the
    tier of the residual rows between layers; ``nodes``: pipeline stages the layers are split over evenly, each
    node a machine like the one planned for.

    ``most``: how our own loop runs it: runs of at most so many rows, whosever they are (0: FlexGen's way, a run is
    always ``rows`` sequences). A block then has as many runs as it takes. ``slots``: tokens of cache in all, and
    ``frames``: pages of a cache on disk that are in memory (0: as many as the rest says).
    """

    model: str
    machine: str
    rows: int
    runs: int
    chunk: int
    places: tuple[Place, ...]
    activations: str
    k_bits: int = 16
    v_bits: int = 16
    nodes: int = 1
    most: int = 0
    slots: int = 0
    frames: int = 0

    def __post_init__(self) -> None:
        for name in ("rows", "runs", "chunk", "nodes", "most", "slots", "frames"):
            value, least = getattr(self, name), int(name in ("rows", "runs", "chunk", "nodes"))
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise Unsupported(f"plan: {name} must be a whole number of at least {least}, got {value!r}.")
        for name in ("k_bits", "v_bits"):
            if getattr(self, name) not in (4, 8, 16):
                raise Unsupported(f"plan: {name} must be 4, 8 or 16, got {getattr(self, name)!r}.")
        if not self.places:
            raise Unsupported("plan: no layers.")

    @property
    def sequences(self) -> int:
        """Sequences in flight on one stage."""
        return self.rows * self.runs

    def to_json(self) -> str:
        """Runs of equal places are written once with their count."""
        data = dataclasses.asdict(self)
        data["places"] = [[len(list(g)), *dataclasses.astuple(p)] for p, g in groupby(self.places)]
        return json.dumps({"version": VERSION, **data})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Raises BadFile when the text is no plan of this version, Unsupported when a value can't be right."""
        data = read_object(text, "plan", VERSION)
        places: list[Place] = []
        for entry in items(data, "places", "plan"):
            if not (isinstance(entry, list) and len(entry) == 5 and all(isinstance(t, str) for t in entry[1:])):
                raise BadFile(f"this plan's places must be [count, weights, compute, kv, attend], got {entry!r}.")
            count = entry[0]
            if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= 1 << 16:
                raise BadFile(f"this plan counts {count!r} layers of a kind; expected 1 to 65536.")
            places += [Place(*entry[1:])] * count
        return build(cls, {**data, "places": tuple(places)}, "plan")


def spread(kinds: Iterable[tuple[Place, int]]) -> tuple[Place, ...]:
    """So many layers of each kind, each kind evenly among the others, so that reads never bunch.

    Each kind's i-th layer wants to sit at the middle of the i-th of ``count`` equal parts; ties by place.
    """
    wanted = [((i + 0.5) / count, place) for place, count in kinds if count for i in range(count)]
    return tuple(place for _, place in sorted(wanted))


def figure(value: float, digits: int = 3) -> str:
    """A positive number to so many significant digits, never with an exponent: 0.0123, 12.3, 1230."""
    return np.format_float_positional(float(f"{value:.{digits}g}"), trim="-")


def lines(table: Sequence[Sequence[Any]]) -> str:
    """Columns, the first flush left, the others flush right."""
    cells = [[str(c) for c in row] for row in table]
    wide = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, wide, strict=True))).rstrip()
        for row in cells
    )
