"""The cost model against its formulas by hand; the search against random plans, budgets and better machines."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import OverBudget, Unsupported
from headrace.model.families import from_config
from headrace.plan.cost import evaluate
from headrace.plan.explain import explain
from headrace.plan.machine import Compute, Link, Machine, Tier
from headrace.plan.pace import paced
from headrace.plan.plan import Place, Plan, figure
from headrace.plan.search import Found, places, search, shapes
from headrace.plan.sizes import LayerCost, ModelCost, Workload
from opt_models import opt

FEW = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MORE = settings(FEW, max_examples=80)


def model(blocks: int, nbytes: int, kinds: int = 1, tied: bool = False) -> ModelCost:
    """Blocks of ``kinds`` kinds, their sizes apart by a half."""
    layers = [LayerCost("embed", "embed", 0 if tied else 4000, 0, 128)]
    for i in range(blocks):
        size = nbytes + nbytes // 2 * (i % kinds)
        layers.append(LayerCost(f"block.{i}", "block", size, size, 700, 64, 1, 64, matrices=(size // 2, size // 2)))
    return ModelCost("toy", (*layers, LayerCost("output", "output", 8000, 8000, 128 + 125)), 64, 125, tied)


def machine(host: int, disk: int, read: float, compute: float, device: int = 0, host_computes: bool = True) -> Machine:
    """Two tiers, or three with a device ten times as fast as the host."""
    tiers = [Tier("host", host, compute, compute), Tier("disk", disk, read, read / 2)]
    links = [Link("disk", "host", read, 1e-6, "disk"), Link("host", "disk", read / 2, 1e-6, "disk")]
    computes = [Compute("host", ((1, compute), (64, 5 * compute)), compute, compute / 2, 1e-6)]
    if not host_computes:
        computes = [dataclasses.replace(computes[0], matmul=(), attend=0.0)]
    if device:
        tiers.insert(0, Tier("device", device, 10 * compute, 10 * compute))
        links += [Link("host", "device", 2 * read), Link("device", "host", 2 * read)]
        computes.insert(0, Compute("device", ((1, 10 * compute), (64, 50 * compute)), 10 * compute, 5 * compute, 1e-6))
    return Machine("toy", tuple(tiers), tuple(links), tuple(computes))


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelCost, Machine, Workload]:
    m = model(draw(st.integers(1, 7)), draw(st.integers(5_000, 200_000)), draw(st.integers(1, 2)), draw(st.booleans()))
    device = draw(st.sampled_from([0, 100_000, 400_000, 10**7]))
    host_computes = draw(st.booleans()) or not device
    on = machine(draw(st.integers(60_000, 2_000_000)), draw(st.sampled_from([0, 10**6, 10**9])),
                 draw(st.floats(1e5, 1e9)), draw(st.floats(1e6, 1e10)), device, host_computes)  # fmt: skip
    return m, on, Workload(draw(st.sampled_from([8, 48])), draw(st.integers(1, 40)), draw(st.integers(1, 5)))


def found(case: tuple[ModelCost, Machine, Workload], **kwargs: object) -> Found | None:
    try:
        return search(*case, gains=False, **kwargs)  # type: ignore[arg-type]
    except OverBudget:
        return None


def random_plan(case: tuple[ModelCost, Machine, Workload], seed: int) -> Plan:
    """Any of the shapes that are tried, any legal place of each layer."""
    m, on, work = case
    r = random.Random(seed)
    knobs = r.choice(list(shapes(m, on, work, 16, 16, 1)))
    where = [r.choice(places(on, layer)) for layer in m.layers]
    if r.random() < 0.7:  # the same for most layers: more of these fit
        common = r.choice(places(on, m.layers[1]))
        where = [
            common if layer.kind == "block" and r.random() < 0.8 else w
            for layer, w in zip(m.layers, where, strict=True)
        ]
    where[-1] = dataclasses.replace(where[-1], compute=where[0].compute, kv=where[0].compute, attend=where[0].compute)
    order = [t.name for t in on.tiers]
    far = max(where[-1].weights, where[0].compute, key=order.index)
    where[-1] = dataclasses.replace(where[-1], weights=far)
    where[0] = dataclasses.replace(where[0], weights=max(where[0].weights, far, key=order.index))
    if m.tied:
        where[0] = where[-1]
    return Plan(m.name, on.name, places=tuple(where), **dataclasses.asdict(knobs))


def check_random(case: tuple[ModelCost, Machine, Workload], objective: str, seed: int) -> None:
    best = found(case, objective=objective)
    for i in range(60):
        plan = random_plan(case, seed + i)
        p = evaluate(case[0], case[1], case[2], plan)
        if all(p.peak(t.name) <= t.capacity for t in case[1].tiers):
            assert best is not None, "a plan fits, and the search found none"
            seconds = p.total if objective == "throughput" else p.wait
            assert best.best.seconds <= seconds * (1 + 3e-4)
    if best is not None:
        assert evaluate(*case, best.best.plan) == best.best.prediction
        for c in (best.best, *best.others):
            assert all(c.prediction.peak(t.name) <= t.capacity for t in case[1].tiers)
            assert c.seconds >= best.best.seconds


def check_better(case: tuple[ModelCost, Machine, Workload], which: int, more: int, faster: float) -> None:
    m, on, work = case
    base = found(case)
    tier = on.tiers[which % len(on.tiers)]
    better = on.faster(tier.name, faster) if more == 0 else on.with_tier(tier.name, capacity=tier.capacity + more)
    if base is not None:
        then = found((m, better, work))
        assert then is not None and then.best.seconds <= base.best.seconds * (1 + 3e-4)


def check_solvers(case: tuple[ModelCost, Machine, Workload]) -> None:
    a, b = found(case, highs=True), found(case, highs=False)
    if a is None or b is None:
        assert b is None  # HiGHS finds a plan wherever there is one; moves may not
        return
    assert a.solver == "HiGHS" and b.solver == "few places"
    exact = len(case[1].tiers) == 2 and len({x.nbytes for x in case[0].layers if x.kind == "block"}) == 1
    assert a.best.seconds * (1 - 3e-4) <= b.best.seconds <= a.best.seconds * (1.02 if exact else 1.5)


RANDOM = given(cases(), st.sampled_from(["throughput", "latency"]), st.integers(0, 2**32))
BETTER = given(cases(), st.integers(0, 2), st.sampled_from([0, 1000, 10**5, 10**7]), st.floats(1.0, 8.0))
test_no_random_plan_that_fits_is_better = FEW(RANDOM(check_random))
test_more_memory_or_speed_never_hurts = FEW(BETTER(check_better))
test_without_highs_the_plan_is_as_good = FEW(given(cases())(check_solvers))
test_no_random_plan_is_better_long = pytest.mark.slow(MORE(RANDOM(check_random)))
test_more_never_hurts_long = pytest.mark.slow(MORE(BETTER(check_better)))
test_without_highs_long = pytest.mark.slow(MORE(given(cases())(check_solvers)))


def test_without_highs_all_layers_may_move_at_once() -> None:
    """Found by ``test_without_highs_long``: a small host takes no mixture, the device everything."""
    on = machine(60_000, 10**9, 1e5, 854885540.0, 10**7, host_computes=False)
    check_solvers((model(2, 5000, kinds=2), on, Workload(8, 25, 2)))


def laptop() -> tuple[ModelCost, Machine, Workload]:
    return model(12, 100_000), machine(900_000, 10**8, 1e6, 1e8), Workload(64, 16, 8)


def test_the_same_question_has_the_same_answer() -> None:
    a, b = search(*laptop()), search(*laptop())
    assert a == b and a.best.plan.to_json() == b.best.plan.to_json()


@given(st.floats(1e-9, 1e15), st.integers(1, 6))
def test_figures_have_their_digits_and_no_exponent(value: float, digits: int) -> None:
    text = figure(value, digits)
    assert set(text) <= set("0123456789.") and float(text) == float(f"{value:.{digits}g}")


def test_what_is_found_is_explained() -> None:
    case = laptop()
    case = (case[0], dataclasses.replace(case[1], network=Link("host", "host", 1e7, 1e-4)), case[2])
    f = search(*case)
    text = explain(case[0], case[1], f)
    assert 1 <= len(f.others) <= 5
    assert [g.what for g in f.gains] == ["+1 GB of host", "+1 GB of disk", "disk twice as fast", "one more node"]
    assert f.gains[0].ratio > 1.5 and all(g.ratio >= 1 - 3e-4 for g in f.gains[:3])
    for word in ("tokens/s", "first token after", "binds", "Next best", "What would help", "peak", "attends"):
        assert word in text
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_what_cant_fit_is_refused_with_what_would() -> None:
    m, on, work = laptop()
    with pytest.raises(OverBudget, match=r"needs 0\.\d+ GB of host \(it has 0\.000\)") as error:
        search(m, on.with_tier("host", capacity=1000), work)
    assert "give it that much" in str(error.value)
    need = float(str(error.value).split("needs ")[1].split(" GB of host")[0])
    assert search(m, on.with_tier("host", capacity=int((need + 0.001) * 1e9)), work, gains=False)


def test_a_plan_over_budget_says_what_takes_the_room() -> None:
    m, on, work = laptop()
    plan = Plan(m.name, on.name, 8, 1, 64, (Place("host", "host", "host", "host"),) * len(m.layers), "host")
    p = evaluate(m, on, work, plan)
    with pytest.raises(OverBudget, match=r"host needs 0\.\d+ GB of 0\.001 GB \(weights 0\.\d+, kv"):
        p.check(on)
    assert p.check(on.with_tier("host", capacity=p.peak("host"))) is p
    with pytest.raises(Unsupported, match="places 3 layers"):
        evaluate(m, on, work, dataclasses.replace(plan, places=plan.places[:3]))


def test_plain_memory_wins_when_everything_fits() -> None:
    m, on, work = laptop()
    best = search(m, on.with_tier("host", capacity=10**9), work, gains=False).best
    assert set(best.plan.places) == {Place("host", "host", "host", "host")}


def test_more_nodes_hold_what_one_cant() -> None:
    m, on, work = laptop()
    on = dataclasses.replace(on, network=Link("host", "host", 1e9, 1e-5))
    one, two = (search(m, on, work, nodes=n, gains=False).best for n in (1, 2))
    assert two.seconds < one.seconds
    with pytest.raises(Unsupported, match="too few for 99 nodes"):
        search(m, on, work, nodes=99)
    with pytest.raises(Unsupported, match="network"):
        search(*laptop(), nodes=2)


def test_terms_are_the_papers_formulas() -> None:
    """FlexGen section 4.3, one block layer at a time: bytes over each link, FLOPs of each place."""
    m, s, n, rows, runs = opt("30b"), 512, 32, 48, 3
    h, bls, count = 7168, 48 * 3, 48
    gib = 2.0**30
    on = Machine(
        "t4",
        (Tier("device", 10**12, 1e15, 1e15), Tier("host", 10**12, 1e15, 1e15), Tier("disk", 10**13, 1e15, 1e15)),
        (Link("host", "device", 12 * gib), Link("device", "host", 5 * gib),
         Link("disk", "host", 1.6e9, resource="disk"), Link("host", "disk", 1.3e9, resource="disk")),
        (Compute("device", ((1, 4.3e12),), 9e12, 8e10), Compute("host", (), 0.0, 1.23e10)),
    )  # fmt: skip
    near = Place("device", "device", "device", "device")

    def decode(place: Place, acts: str = "device") -> dict[str, float]:
        where = (near, *[place] * count, near)
        p = evaluate(m, on, Workload(s, n, bls), Plan(m.name, on.name, rows, runs, s, where, acts))
        return dict(p.terms["decode"])

    weights = 2 * 12 * h * h
    seen = 4 * bls * (s + n / 2) * h
    matrices = bls * 2 * 12 * h * h / 4.3e12 * count + bls * 2 * 50272 * h / 4.3e12
    assert decode(near)["compute device"] == pytest.approx(matrices + count * seen / 8e10, rel=1e-3)
    t = decode(Place("host", "device", "device", "device"))
    assert t["host>device"] == pytest.approx(count * weights / (12 * gib))
    t = decode(Place("device", "device", "host", "host"))  # query down, result and nothing else up
    assert t["compute host"] == pytest.approx(count * seen / 1.23e10)
    assert t["device>host"] == pytest.approx(count * (4 * bls * h + 4 * bls * h) / (5 * gib))
    assert t["host>device"] == pytest.approx(count * 4 * bls * h / (12 * gib))
    t = decode(Place("disk", "device", "disk", "host"))
    assert t["disk"] == pytest.approx(count * ((weights + seen) / 1.6e9 + 4 * bls * h / 1.3e9))
    t = decode(Place("device", "device", "host", "device"))  # the cache itself goes up
    assert t["host>device"] == pytest.approx(count * seen / (12 * gib))
    t = decode(near, "host")
    assert t["host>device"] == pytest.approx((count + 2) * 4 * bls * h / (12 * gib))


def test_a_single_run_hides_nothing_of_its_own_chain() -> None:
    m, on = opt("125m"), machine(10**10, 10**10, 1e9, 1e10, 10**10)
    where = tuple(Place("device", "device", kv, kv) for kv in ["device"] + ["host"] * (len(m.layers) - 2) + ["device"])
    one = evaluate(m, on, Workload(64, 8, 4), Plan(m.name, on.name, 4, 1, 64, where, "device"))
    four = evaluate(m, on, Workload(64, 8, 16), Plan(m.name, on.name, 4, 4, 64, where, "device"))
    terms = one.terms["decode"]
    assert one.decode_pass == pytest.approx(sum(terms[r] for r in ("compute host", "compute device", "host>device"))
                                            + terms["device>host"], rel=0.05)  # fmt: skip
    assert four.decode_pass < 4 * one.decode_pass


def test_sizes_of_a_spec_and_of_a_table_agree() -> None:
    config = {
        "model_type": "opt", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072,
        "vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": 768, "do_layer_norm_before": True,
        "activation_function": "relu",
    }  # fmt: skip
    spec = from_config(config)
    a = ModelCost.from_spec("opt-125m", spec, lambda _, n, k: 2 * n * k)
    b = opt("125m")
    assert [x.key for x in a.layers] == [x.key for x in b.layers] == list(spec.keys)
    assert a.nbytes == pytest.approx(2 * spec.parameters, rel=0.002) and b.nbytes == pytest.approx(a.nbytes, rel=0.002)
    for x, y in zip(a.layers, b.layers, strict=True):
        assert (x.kind, x.macs, x.query, x.kv_heads, x.head_dim) == (y.kind, y.macs, y.query, y.kv_heads, y.head_dim)
        assert x.matrices == y.matrices or x.kind != "block"
        assert x.kv_bytes(8, 4) == spec.kv_bytes(x.key, 8, 4)
    assert b.layers[-1].nbytes == 2 * 50272 * 768 and a.layers[0].nbytes == pytest.approx(b.layers[0].nbytes, rel=0.01)
    with pytest.raises(Unsupported, match="no OPT of size"):
        opt("7b")
    with pytest.raises(Unsupported, match="at least one"):
        Workload(0, 1, 1)


def test_without_the_extra_highs_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "highspy", None)
    with pytest.raises(Unsupported, match=r"headrace\[plan\]"):
        search(*laptop(), highs=True)
    assert search(*laptop(), gains=False).solver == "few places"


def test_shapes_cover_the_whole_batch() -> None:
    m, on, _ = laptop()
    for batch in (1, 7, 64, 300):
        tried = {(k.rows, k.runs) for k in shapes(m, on, Workload(8, 8, batch), 16, 16, 1)}
        assert (1, 1) in tried and all(r * k <= batch for r, k in tried)
        assert max(r * k for r, k in tried) >= min(batch, 256) * 0.9


@given(
    st.lists(st.tuples(st.floats(0, 5), st.sampled_from([0.0, 0.5, 2.0])), min_size=1, max_size=8), st.integers(1, 4)
)
def test_a_paced_pass_is_between_its_bounds(layers: list[tuple[float, float]], buffers: int) -> None:
    computed, read = (sum(part) for part in zip(*layers, strict=True))
    seconds = paced(layers, buffers, passes=12)
    assert max(computed, read) * (1 - 1e-9) <= seconds <= (computed + read) * (1 + 1e-9)
    assert paced(layers, buffers + 1, passes=12) <= seconds * (1 + 1e-9) + 1e-9


def test_a_long_layer_hides_only_as_many_reads_as_there_are_buffers() -> None:
    short = [(0.0, 1.0)] * 10
    assert paced([*short, (10.0, 0.0)], 3) == pytest.approx(17.0)  # 7 of 10 reads are waited for
    assert paced([*short, (10.0, 0.0)], 10) == pytest.approx(10.0)
    assert paced([(1.0, 0.0)] * 4, 1) == 4.0
