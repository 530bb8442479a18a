"""The plan over ranks: slower ranks get fewer layers, blocks in flight keep every stage at work, memory is kept."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from headrace.cluster.split import by_time
from headrace.errors import OverBudget
from headrace.formats.index import open_model
from headrace.kernels.dispatch import make_device
from headrace.model.layers import Model, load_model
from headrace.options import Choice, Options
from headrace.placement import Sizes
from headrace.plan.machine import Compute, Link, Machine, Tier
from headrace.plan.pace import circling
from headrace.plan.sizes import Workload
from headrace.run.head import Head
from headrace.run.schedule import Order
from headrace.run.stage import Stage
from headrace.run.types import Choice as Token
from headrace.run.types import Request, RunMessage, Step, Submit
from headrace.sharing import Rank, Shared, heard, said, share
from helpers_tiny import tiny_model

FREE = frozenset({"rows", "runs", "sequences", "caches"})


def constants(flops: float, disk: float) -> Machine:
    tiers = Tier("host", 1 << 40, 1e15, 1e15), Tier("disk", 1 << 40, disk, disk)
    links = (Link("disk", "host", disk, resource="disk"),)
    return Machine("test", tiers, links, (Compute("host", ((1, flops),), 1e15, 1e15),))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(open_model(tiny_model(tmp_path_factory.mktemp("share") / "tiny.gguf", blocks=24, text=True)))


def shared(
    model: Model, flops: list[float], memory: list[int], disk: float = 1e6, batch: int = 48, free: frozenset[str] = FREE
) -> Shared:  # fmt: skip
    choice = Choice(Workload(16, 16, batch), free=free)
    options = Options(ram=1, rows=64, sequences=48, caches=0, choice=choice)
    ranks = [Rank(constants(f, disk), m, True) for f, m in zip(flops, memory, strict=True)]
    found = share(make_device(threads=1), model, options, 64, ranks, 99, None)
    assert found is not None
    return found


def counts(found: Shared) -> list[int]:
    return [end - first for first, end in found.edges]


PLENTY = 1 << 30


def test_alike_ranks_share_evenly_and_keep_a_block_each(model: Model) -> None:
    found = shared(model, [1e8] * 3, [PLENTY] * 3)
    assert sum(counts(found)) == len(model.layers)
    assert max(counts(found)) - min(counts(found)) <= 2  # the embedding costs nothing, the output more than a block
    assert found.blocks >= 3 and found.together == (0, 0, 0) and found.sequences == 48


def test_a_slower_rank_gets_fewer_layers_and_the_work_takes_less_than_evenly(model: Model) -> None:
    even, uneven = shared(model, [1e8] * 3, [PLENTY] * 3), shared(model, [1e8, 0.5e8, 1e8], [PLENTY] * 3)
    assert counts(uneven)[1] < counts(even)[1] and "at 50% of the fastest" in uneven.why[1]
    assert uneven.seconds < 1.5 * even.seconds, "evenly it would take twice as long"
    a_bit = shared(model, [1e8, 0.95e8, 1e8], [PLENTY] * 3)
    assert counts(a_bit) == counts(even), "5% are noise"


def test_a_rank_with_less_memory_gets_fewer_layers_or_reads_them(model: Model) -> None:
    block = model.layers[5].nbytes
    small = Sizes(make_device(threads=1), model).scratch(64) + 7 * block
    found = shared(model, [1e8] * 3, [PLENTY, small, PLENTY], disk=1e3)
    assert counts(found)[1] < counts(shared(model, [1e8] * 3, [PLENTY] * 3))[1]
    with pytest.raises(OverBudget, match="can't hold the model between them"):
        shared(model, [1e8] * 3, [1000] * 3)


def test_one_rank_that_reads_rules_how_many_blocks_travel() -> None:
    """Three stages that read alike go at their best with three blocks; one that reads alone, with one."""
    alike, alone = [(0.3, 1.0)] * 3, [(0.3, 1.0), (0.1, 0.0), (0.1, 0.0)]
    assert [circling(alike, n, False, 0.0) for n in (1, 3, 6)] == pytest.approx([3, 3, 6])
    assert [circling(alone, n, False, 0.0) for n in (1, 2, 3)] == pytest.approx([1.2, 2, 3])
    assert circling(alike, 6, True, 0.0) == pytest.approx(3) and circling(alone, 6, True, 0.0) < 2.5
    assert circling([(1.0, 0.0)] * 3, 3, True, 0.0) == pytest.approx(3)


def test_what_a_rank_says_arrives() -> None:
    rank = Rank(constants(1e9, 1e8), 12345, True)
    assert heard(*said(rank)) == rank and heard(*said(Rank(None, 0, False))).machine is None


def test_the_split_is_the_best_of_all() -> None:
    costs = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    rates = [1.0, 0.5, 2.0]

    def seconds(rank: int, first: int, end: int) -> float:
        return sum(costs[first:end]) / rates[rank]

    counts, best = by_time(seconds, len(costs), 3)
    every = [
        max(seconds(r, a, b) for r, (a, b) in enumerate(itertools.pairwise((0, *cut, len(costs)))))
        for cut in itertools.combinations(range(1, len(costs)), 2)
    ]
    assert best == min(every) and sum(counts) == len(costs)


def test_next_tokens_are_divided_among_the_blocks_in_flight() -> None:
    """Ten sequences and three blocks: no block has more than four of their next tokens, and none waits for long."""
    head = Head(40, Order(rows=64, blocks=3, chunk=64, sequences=10, even=True))
    runs = [
        e for e in head.on_events([Submit(Request(i, (1, 2), 8)) for i in range(10)], 0.0) if isinstance(e, RunMessage)
    ]
    assert [len(run.rows) for run in runs] == [20]
    stage = Stage(0, 1, 1)
    sizes, queue = [], runs
    while queue:
        run = queue.pop(0)
        effects = list(stage.on_event(run, 0.0))
        for effect in effects:
            if isinstance(effect, Step):
                at = stage.runs[effect.run]
                at.choices = tuple(Token(i, 5) for i in at.live if run.rows[i].wanted)
                effects += stage.on_event(effect, 0.0)
            else:
                new = [e for e in head.on_event(effect, 0.0) if isinstance(e, RunMessage)]  # type: ignore[arg-type]
                sizes += [len(e.rows) for e in new]
                queue += new
    assert max(sizes) == 4 and head.check_integrity() == [] and head.idle


def test_a_stage_takes_waiting_blocks_together_up_to_its_rows() -> None:
    def message(run: int, seq: int, rows: int) -> RunMessage:
        head = Head(9, Order())
        head._next_run = run
        made = head.on_event(Submit(Request(seq, tuple(range(rows)), 4)), 0.0)
        return next(e for e in made if isinstance(e, RunMessage))

    for together, expected in ((0, [0]), (5, [0, 1]), (9, [0, 1, 2])):
        stage = Stage(0, 2, 2, together=together)
        stage.blocks.append([7])  # nothing begins yet
        stage.block = [7]
        for run in range(3):
            stage.on_event(message(run, run, 2 + run), 0.0)
        stage.blocks.popleft()
        stage._begin()
        assert stage.block == expected


def test_the_choice_of_a_user_stays(model: Model) -> None:
    found = shared(model, [1e8] * 3, [PLENTY] * 3, free=frozenset())
    assert (found.rows, found.runs, found.pages) == (64, 1, 99)
    assert found.order(replace(Options(), sequences=7)).sequences == 7


def test_rows_by_hand_that_no_shape_allows_leave_the_rest_as_it_is(model: Model) -> None:
    options = Options(ram=1, rows=1, sequences=48, choice=Choice(Workload(16, 16, 48), free=frozenset()))
    ranks = [Rank(constants(1e9, 1e6), PLENTY, True)] * 2
    assert share(make_device(threads=1), model, options, 64, ranks, 99, None) is None
