"""A layer split between two places computes what it computes at one, and moves only what it must."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from headrace.kernels.ops import Act, Add, Attend, Copy, Gather, Linear, Norm, Op, Rope, Scale, StoreKV
from headrace.kernels.split import Part, reads, split, writes

NAMES = ["x", "a", "b", "c", "d"]


def attend(dst: str, src: str) -> Attend:
    return Attend(dst, src, 4, 2, 32, 0.2)


BLOCK: list[Op] = [
    Norm("h", "x", "n"), Norm("f", "x", "m"), Linear("q", "h", "q"), Linear("k", "h", "k"), Linear("v", "h", "v"),
    Rope("q", 4, 32, "half", (1.0,)), Rope("k", 2, 32, "half", (1.0,)), StoreKV("k", "v"), attend("a", "q"),
    Linear("x", "a", "o", accumulate=True), Linear("g", "f", "g"), Linear("u", "f", "u"), Act("g", "g", "silu", "u"),
    Linear("x", "g", "d", accumulate=True),
]  # fmt: skip


def test_a_block_sends_q_k_v_and_gets_the_result() -> None:
    first, second, third = split(BLOCK)
    assert (first.near, second.near, third.near) == (True, False, True)
    assert [first.brings, second.brings, third.brings] == [(), ("k", "v", "q"), ("a",)]
    assert [*first.ops, *second.ops, *third.ops] == BLOCK
    assert second.ops == (StoreKV("k", "v"), attend("a", "q"))


def test_what_is_wanted_near_comes_back() -> None:
    assert split([attend("x", "x")])[-1] == Part(True, (), ("x",))
    assert split([Norm("h", "x", "n")]) == (Part(True, (Norm("h", "x", "n"),), ()),)
    assert split([]) == ()


def run(ops: Sequence[Op], registers: dict[str, int], log: list[int]) -> None:
    """Each value stands for the operation, its number and what it read."""
    for op in ops:
        value = hash((len(log), *(registers[r] for r in reads(op))))
        log.append(value)
        if (target := writes(op)) is not None:
            registers[target] = value


@st.composite
def programs(draw: st.DrawFn) -> list[Op]:
    known = ["x"]
    ops: list[Op] = []
    for _ in range(draw(st.integers(0, 12))):
        src, other, dst = draw(st.sampled_from(known)), draw(st.sampled_from(known)), draw(st.sampled_from(NAMES))
        again = draw(st.booleans()) and dst in known
        kinds: list[Op] = [
            Norm(dst, src, "w"), Linear(dst, src, "w", accumulate=again), Gather(dst, "w", accumulate=again),
            Rope(src, 1, 2, "half", (1.0,)), StoreKV(src, other), attend(dst, src), Act(dst, src, "silu", other),
            Add(src, other), Copy(dst, src), Scale(src, 2.0),
        ]  # fmt: skip
        op = draw(st.sampled_from(kinds))
        ops.append(op)
        known += [t for t in [writes(op)] if t is not None and t not in known]
    return ops


@given(programs())
def test_parts_by_turns_compute_the_whole(ops: list[Op]) -> None:
    whole, stayed = {"x": 1}, list[int]()
    run(ops, whole, stayed)
    places: dict[bool, dict[str, int]] = {True: {"x": 1}, False: {}}
    log: list[int] = []
    for part in split(ops):
        here, there = places[part.near], places[not part.near]
        for register in part.brings:
            assert here.get(register) != there[register], "it was there already"
            here[register] = there[register]
        run(part.ops, here, log)
        assert all(isinstance(op, StoreKV | Attend) != part.near for op in part.ops)
    assert log == stayed
    assert places[True]["x"] == whole["x"]
