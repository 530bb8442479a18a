"""A layer's operations split between two places, so that only what the other place needs crosses. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from headrace.kernels.ops import Add, Attend, Copy, Gather, Linear, Norm, Op, Rope, Scale, StoreKV


@dataclass(frozen=True)
class Part:
    """Operations computed at one place, in order. ``brings``: registers copied from the other place before them."""

    near: bool
    ops: tuple[Op, ...]
    brings: tuple[str, ...]


def split(
    ops: Sequence[Op], away: tuple[type, ...] = (StoreKV, Attend), ends: Sequence[str] = ("x",)
) -> tuple[Part, ...]:
    """Parts by turns: operations of the kinds ``away`` elsewhere, the others near; ``x`` starts near.

    A register is copied only where it is read after being written at the other place. ``ends``: registers wanted near
    afterwards; a last part without operations brings those that aren't, if anything wrote them.
    """
    here: dict[str, set[bool]] = {"x": {True}}  # register -> places where its latest value lies
    parts: list[Part] = []
    for near, group in groupby(ops, lambda op: not isinstance(op, away)):
        part = tuple(group)
        brings: list[str] = []
        for op in part:
            for register in reads(op):
                if near not in here[register]:
                    brings.append(register)
                    here[register].add(near)
            if (target := writes(op)) is not None:
                here[target] = {near}
        parts.append(Part(near, part, tuple(brings)))
    missing = tuple(r for r in ends if True not in here.get(r, {True}))
    return (*parts, Part(True, (), missing)) if missing else tuple(parts)


def reads(op: Op) -> tuple[str, ...]:
    """Registers whose values an operation needs, in the order of its fields."""
    match op:
        case Gather():
            return (op.dst,) if op.accumulate else ()
        case Linear():
            return (op.src, op.dst) if op.accumulate else (op.src,)
        case Rope() | Scale():
            return (op.buf,)
        case StoreKV():
            return (op.k, op.v)
        case Add():
            return (op.dst, op.src)
        case Norm() | Attend() | Copy():
            return (op.src,)
    return (op.src,) if op.up is None else (op.src, op.up)


def writes(op: Op) -> str | None:
    """The register an operation sets."""
    match op:
        case StoreKV():
            return None
        case Rope() | Scale():
            return op.buf
    return op.dst
