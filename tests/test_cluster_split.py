"""Which rank holds which layers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cluster.split import Shares, by_shares, by_weight, check, parse, ranges
from headrace.errors import BadRequest


def test_the_forms_people_write() -> None:
    assert parse("0.1,0.4,0.5/1.0") == Shares((0.1, 0.4, 0.5), (1.0,))
    assert parse("0.25,0.25,0.25,0.25") == Shares((0.25,) * 4)
    assert parse("0,.5, .5/0.5,0.5") == Shares((0, 0.5, 0.5), (0.5, 0.5))
    assert parse("0.3333333,0.3333333,0.3333334/1").ranks == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0.6,0.5", "target's shares sum to 1.1"),
        ("0.5,0.5/0.7,0.4", "drafter's shares sum to 1.1"),
        ("0.5//0.5", "2 slashes"),
        ("0.5,,0.5", "'' is no share"),
        ("0.5,half", "'half' is no share"),
        ("0.5,-0.1", "'-0.1' is no share"),
        ("nan,0.5", "'nan' is no share"),
        ("1e999", "'1e999' is no share"),
        ("", "'' is no share"),
        ("0.5/", "'' is no share"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(text)
    assert says in str(caught.value)


def test_shares_are_for_the_ranks_and_models_there_are() -> None:
    check(parse("0.5,0.5"), 2, drafting=False)
    check(parse("0.5,0.5/1"), 3, drafting=True)
    for text, ranks, drafting, says in [
        ("0.5,0.5", 2, True, "no slash"),
        ("0.5,0.5/1", 3, False, "leave the slash out"),
        ("0.5,0.5", 3, False, "is for 2 ranks and 3 were started"),
        ("0.5,0.5/1", 4, True, "is for 3 ranks and 4 were started"),
    ]:
        with pytest.raises(BadRequest) as caught:
            check(parse(text), ranks, drafting)
        assert says in str(caught.value)


def test_leftovers_go_to_the_first_rank() -> None:
    assert by_shares((0.1, 0.4, 0.5), 80) == (8, 32, 40)
    assert by_shares((0.25,) * 4, 30) == (9, 7, 7, 7)
    assert by_shares((0.1, 0.2), 10) == (8, 2)
    assert by_shares((0.0, 0.5, 0.5), 10) == (0, 5, 5)
    assert by_shares((0.3333333, 0.3333333, 0.3333334), 30) == (10, 10, 10)
    with pytest.raises(BadRequest, match="less than one of 10 blocks"):
        by_shares((0.9, 0.05), 10)


def test_weights_are_split_evenly_and_by_rates() -> None:
    assert by_weight([1.0] * 12, [1, 1, 1]) == (4, 4, 4)
    assert by_weight([0, *[1.0] * 8, 4], [1, 1]) == (7, 3)
    assert by_weight([1.0] * 9, [2, 1]) == (6, 3)
    with pytest.raises(BadRequest, match="5 ranks were started and the model has 4 layers"):
        by_weight([1.0] * 4, [1.0] * 5)


weights = st.lists(st.floats(0, 10), min_size=1, max_size=8)
rates = st.lists(st.floats(0.1, 5), min_size=1, max_size=4)


@given(weights, rates)
def test_no_split_is_faster(costs: list[float], speeds: list[float]) -> None:
    if len(costs) < len(speeds):
        return

    def slowest(counts: tuple[int, ...]) -> float:
        return max(sum(costs[a:b]) / r for (a, b), r in zip(ranges(counts), speeds, strict=True))

    counts = by_weight(costs, speeds)
    assert sum(counts) == len(costs) and min(counts) >= 1
    cuts = itertools.combinations(range(1, len(costs)), len(speeds) - 1)
    every = [tuple(b - a for a, b in itertools.pairwise([0, *cut, len(costs)])) for cut in cuts]
    assert slowest(counts) <= min(map(slowest, every)) * (1 + 1e-6) + 1e-9


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(6, 100))
def test_every_block_has_one_rank(parts: list[int], blocks: int) -> None:
    total = max(sum(parts), 1)
    shares = tuple(p / total for p in parts)
    try:
        counts = by_shares(shares, blocks)
    except BadRequest:
        assert any(s * blocks < 1 for s in shares[1:])
        return
    assert sum(counts) == blocks and all(c >= 1 for c in counts[1:]) and counts[0] >= 0
    assert all(abs(c - s * blocks) < 1 for c, s in zip(counts[1:], shares[1:], strict=True))
