"""Machines and plans as data: round trips, refusals, paths, rates; the probe on a real device."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import BadFile, HeadraceError, Unsupported
from headrace.formats.files import DirectFile
from headrace.plan.machine import Compute, Link, Machine, Tier
from headrace.plan.plan import Place, Plan, spread
from headrace.plan.probe import REQUEST, Disk, disk_rate, probe
from reference_device import ReferenceDevice

settings.register_profile("plan", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("plan")

RATES = st.floats(1.0, 1e15)
SIZES = st.integers(0, 1 << 50)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    names = draw(st.lists(st.sampled_from(["device", "host", "far", "disk"]), min_size=1, unique=True))
    tiers = tuple(Tier(n, draw(SIZES), draw(RATES), draw(RATES), draw(SIZES)) for n in names)
    pairs = draw(st.lists(st.tuples(st.sampled_from(names), st.sampled_from(names)), max_size=5))
    links = tuple(Link(a, b, draw(RATES), draw(st.floats(0, 1)), draw(st.sampled_from(["", "bus"]))) for a, b in pairs)
    rows = sorted(draw(st.sets(st.integers(1, 4096), min_size=1, max_size=4)))
    curve = tuple((r, draw(RATES)) for r in rows)
    more = {"formats": {"Q8_0": curve}, "attends": {"8/4": (draw(RATES), draw(RATES))}, "row": draw(st.floats(0, 1))}
    more = more if draw(st.booleans()) else {}
    compute = Compute(names[0], curve, draw(RATES), draw(RATES), draw(st.floats(0, 1)), **more)  # type: ignore[arg-type]
    return Machine(
        "m", tiers, links, (compute,), draw(st.sampled_from([None, Link(names[0], names[0], 1e9)])), {"a": "b"}
    )


@given(machines())
def test_a_machine_survives_json(m: Machine) -> None:
    assert Machine.from_json(m.to_json()) == m


TIERS = st.sampled_from(["device", "host", "disk"])


@given(
    st.lists(st.tuples(st.builds(Place, TIERS, TIERS, TIERS, TIERS), st.integers(1, 9)), min_size=1, max_size=6),
    st.tuples(*[st.integers(1, 10**6)] * 7),
    st.sampled_from([4, 8, 16]),
)
def test_a_plan_survives_json(kinds: list[tuple[Place, int]], numbers: tuple[int, ...], bits: int) -> None:
    places = tuple(p for place, n in kinds for p in [place] * n)
    rows, runs, chunk, nodes, most, slots, frames = numbers
    plan = Plan("model", "machine", rows, runs, chunk, places, "host", 16, bits, nodes, most, slots, frames)
    assert Plan.from_json(plan.to_json()) == plan


PLAN = Plan("m", "c", 1, 1, 1, (Place("host", "host", "host", "host"),), "host")


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"rows": 0},
        {"rows": True},
        {"runs": "1"},
        {"chunk": 1.5},
        {"k_bits": 5},
        {"places": []},
        {"places": [[0, "a", "b", "c", "d"]]},
        {"places": [[1 << 40, "a", "b", "c", "d"]]},
        {"places": [[1, "a", "b", "c"]]},
        {"places": [[1, "a", "b", "c", 4]]},
        {"places": "host"},
        {"activations": 3},
        {"model": None},
        {"surprise": 1},
        {"most": -1},
        {"frames": True},
    ],
)
def test_a_wrong_plan_is_refused_in_one_sentence(change: dict[str, object]) -> None:
    with pytest.raises(HeadraceError) as error:
        Plan.from_json(json.dumps({**json.loads(PLAN.to_json()), **change}))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version": 1}', "null", '{"version": 1, "places": [[1]]}'])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(BadFile):
        Plan.from_json(text)
    with pytest.raises(BadFile):
        Machine.from_json(text)


WRONG = [
    None,
    -1,
    -1e308,
    float("nan"),
    float("inf"),
    "x",
    "",
    [],
    {},
    True,
    10**400,
    1e30,
    1e-320,
    [[]],
    [1],
    {"a": 1},
]


def _everywhere(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value of a JSON text but the first."""
    for key in data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield (*at, key)
        yield from _everywhere(data[key], (*at, key))


def test_no_number_of_a_machine_may_be_what_plans_cant_reckon_with() -> None:
    more = {"formats": {"Q8_0": ((1, 2e9), (4, 3e9))}, "attends": {"8/4": (1e9, 2e9)}}
    m = three()
    text = dataclasses.replace(m, computes=(dataclasses.replace(m.computes[0], **more),)).to_json()
    for way in _everywhere(json.loads(text)):
        for wrong in WRONG:
            data = json.loads(text)
            *into, last = way
            reduce(getitem, into, data)[last] = wrong
            try:
                made = Machine.from_json(json.dumps(data))
            except HeadraceError as error:
                assert "\n" not in str(error) and len(str(error)) < 300
                continue
            for part in (*made.tiers, *made.links, *made.computes):
                for value in dataclasses.astuple(part):
                    assert not isinstance(value, int | float) or 0 <= value <= 1e24, (way, wrong)
            for c in made.computes:
                assert not c.matmul or (0 < c.rate(3) < 1e25 and 0 < c.rate(3, "Q8_0") < 1e25), (way, wrong)
                assert all(0 < rate < 1e25 for pair in c.attends.values() for rate in pair)


def test_json_nested_too_deep_is_refused() -> None:
    with pytest.raises(BadFile):
        Machine.from_json("[" * 100_000)


def three() -> Machine:
    return Machine(
        "three",
        (Tier("device", 10, 1e9, 1e9), Tier("host", 10, 1e9, 1e9), Tier("disk", 10, 1e9, 1e9)),
        (Link("disk", "host", 1e9, resource="disk"), Link("host", "disk", 5e8, resource="disk"),
         Link("host", "device", 2e9), Link("device", "host", 3e9)),
        (Compute("device", ((1, 1e9), (4, 4e9), (16, 8e9)), 1e9, 1e9),),
    )  # fmt: skip


def test_paths_go_by_the_fewest_links() -> None:
    m = three()
    assert [(k.src, k.dst) for k in m.path("disk", "device")] == [("disk", "host"), ("host", "device")]
    assert m.path("host", "host") == ()
    cut = dataclasses.replace(m, links=m.links[:2])
    assert not cut.connected("disk", "device")
    with pytest.raises(Unsupported, match="no way from tier 'disk' to 'device'"):
        cut.path("disk", "device")


def test_rates_between_measured_row_counts_follow_the_logarithm() -> None:
    c = three().computes[0]
    assert [c.rate(r) for r in (1, 2, 4, 8, 16, 99)] == pytest.approx([1e9, 2.5e9, 4e9, 6e9, 8e9, 8e9])
    assert Compute("x", ((4, 7.0),)).rate(1) == Compute("x", ((4, 7.0),)).rate(100) == 7.0


def test_a_faster_tier_takes_its_links_along() -> None:
    m = three().faster("disk", 2.0)
    assert [k.rate for k in m.links] == [2e9, 1e9, 2e9, 3e9]
    assert m.tier("disk").read == 2e9 and m.tier("host").read == 1e9


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tiers": ()}, "tier names"),
        ({"computes": ()}, "no place computes"),
        ({"links": (Link("disk", "moon", 1.0),)}, "no known tier"),
        ({"links": (Link("disk", "host", 0.0),)}, "positive"),
        ({"links": (Link("disk", "host", float("nan")),)}, "positive"),
        ({"computes": (Compute("moon", ((1, 1.0),)),)}, "no tier"),
        ({"computes": (Compute("host", ((2, 1.0), (1, 1.0))),)}, "ascend"),
    ],
)
def test_a_machine_that_cant_be_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        dataclasses.replace(three(), **change)  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=4))
def test_kinds_are_spread_evenly(counts: list[int]) -> None:
    kinds = [(Place(str(i), "c", "k", "c"), n) for i, n in enumerate(counts)]
    out = spread(kinds)
    total = len(out)
    for place, n in kinds:
        where = [i for i, p in enumerate(out) if p == place]
        assert len(where) == n
        for j, i in enumerate(where):  # never further from its even place than the other kinds push it
            assert abs((i + 0.5) / total - (j + 0.5) / n) <= len(counts) / total
    assert spread(kinds) == out


def test_the_probe_measures_a_device(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(bytes(2 * REQUEST))
    m = probe(ReferenceDevice(), capacity=1 << 30, formats=("F32", "Q8_0"), kv=((8, 4),), disk=Disk(data, 1 << 40),
              rows=(1, 2), width=32, span=1 << 16, length=32)  # fmt: skip
    host = m.computes[0]
    assert set(host.formats) == {"F32", "Q8_0"} and host.matmul == host.formats["F32"]
    assert host.attention("8/4", True) == host.attends["8/4"][0] and host.attention("16/16", False) == host.attend_one
    assert min(host.linear, host.value) > 0
    assert [r for r, _ in host.matmul] == [1, 2] and all(f > 0 for _, f in host.matmul)
    assert min(host.attend, host.attend_one, host.overhead, m.tier("host").read, m.tier("disk").read) > 0
    assert "assumed" in m.sources["disk"]
    assert Machine.from_json(m.to_json()) == m


def test_a_failing_disk_is_an_error_of_the_probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    data.write_bytes(bytes(1 << 16))

    def fail(self: DirectFile, out: memoryview, offset: int) -> None:
        raise BadFile("the disk is gone")

    monkeypatch.setattr(DirectFile, "read_into", fail)
    with pytest.raises(BadFile, match="gone"):
        disk_rate(data, 4096, 2, 0.1)


def test_the_probe_refuses_what_it_cant_measure(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.write_bytes(b"x")
    for path in (small, tmp_path, tmp_path / "missing"):
        with pytest.raises(Unsupported, match="at least"):
            disk_rate(path)
    with pytest.raises(Unsupported, match="ascending"):
        probe(ReferenceDevice(), capacity=1, formats=("Q8_0",), kv=((16, 16),), rows=(4, 2))
