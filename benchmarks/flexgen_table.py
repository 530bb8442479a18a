"""FlexGen's published table in simulation, and what our search finds on the same machine.

``python benchmarks/flexgen_table.py [--json OUT] [--quick]``. All constants of the paper's machine are in
``data/t4.json`` with their sources; nothing is fitted to the table. ``--quick`` leaves out the searches.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from flexgen_baselines import FlexGen, Timing, row_order
from flexgen_published import (
    FOUR_NODES,
    FOUR_NODES_PUBLISHED,
    LENGTHS,
    POLICIES,
    PUBLISHED,
    ROW_BATCHES,
    SIZES,
    Policy,
)
from headrace.plan.cost import Prediction, evaluate
from headrace.plan.flexgen import placed
from headrace.plan.machine import Link, Machine
from headrace.plan.plan import Plan, lines
from headrace.plan.search import search
from headrace.plan.sizes import Workload
from opt_models import opt

DATA = Path(__file__).parent / "data"
WITHIN = 0.25


def machine(name: str = "t4") -> Machine:
    return Machine.from_json((DATA / f"{name}.json").read_text(encoding="utf-8"))


def with_disk(m: Machine, tier: str, read: float, write: float) -> Machine:
    """The machine with one tier's rates, and its links', set."""
    links = tuple(
        dataclasses.replace(k, rate=read if k.src == tier else write) if tier in (k.src, k.dst) else k for k in m.links
    )
    return dataclasses.replace(m.with_tier(tier, read=read, write=write), links=links)


def cell(
    system: str, size: str, length: tuple[int, int], published: float | None, timing: Timing | None
) -> dict[str, Any]:
    row: dict[str, Any] = {"system": system, "model": f"opt-{size}", "prompt": length[0], "generated": length[1],
                           "published": published}  # fmt: skip
    if timing is not None:
        row |= {"predicted": timing.tokens_per_s, "prefill_s": timing.prefill, "token_s": timing.token}
        if published is not None:
            row["error"] = timing.tokens_per_s / published - 1
    return row


def policy_of(system: str, size: str, length: tuple[int, int]) -> Policy | None:
    return POLICIES.get((size, length[0], system.endswith("4-bit"))) if length[1] == 32 else None


def table(m: Machine) -> list[dict[str, Any]]:
    """Every cell of the published table; those without a published policy or batch have no prediction."""
    out = []
    for system in PUBLISHED:
        for length in LENGTHS:
            for i, size in enumerate(SIZES):
                published, timing = PUBLISHED[system][length][i], None
                if system.startswith("flexgen"):
                    policy = policy_of(system, size, length)
                    if policy is not None:
                        timing = FlexGen(opt(size), m, Workload(*length, policy.rows * policy.runs), policy).timing()
                elif length[1] == 32:
                    batch, home = ROW_BATCHES[system][length[0]][i]
                    zero = system == "zero"
                    timing = row_order(opt(size), m, Workload(*length, batch), home, overlap=zero, pinned=zero)
                out.append(cell(system, size, length, published, timing))
    return out


def counted(cells: list[dict[str, Any]]) -> tuple[int, int]:
    """FlexGen's cells with a published policy: within 25%, and all."""
    errors = [c["error"] for c in cells if c["system"].startswith("flexgen") and "error" in c]
    return sum(abs(e) <= WITHIN for e in errors), len(errors)


def pipeline(m: Machine) -> list[dict[str, Any]]:
    """Four nodes, 512+32: the whole, and decoding alone."""
    out = []
    for size, policy in FOUR_NODES.items():
        t = FlexGen(opt(size), m, Workload(512, 32, policy.rows * policy.runs), policy, nodes=4).timing()
        both, decode = FOUR_NODES_PUBLISHED[size]
        out.append({"model": f"opt-{size}", "published": both, "predicted": t.tokens_per_s,
                    "published_decode": decode, "predicted_decode": t.sequences / t.token})  # fmt: skip
    return out


NETWORK = Link("host", "host", 1.25e9, 1e-4)
"""Between the four nodes, which nobody published: 10 Gbit/s, a stand-in. A block's activations are few beside it."""


def our_pipeline(m: Machine, batch: int = 1024) -> list[dict[str, Any]]:
    """Four nodes, 512+32, under our own model: the published policies, and what our search finds (fp16)."""
    on, out = dataclasses.replace(m, network=NETWORK), []
    for size, policy in FOUR_NODES.items():
        model, work = opt(size), Workload(512, 32, batch)
        r = placed(model, policy.percent, host_attention=policy.host_attention)
        plan = Plan(model.name, on.name, policy.rows, policy.runs, 512, r.places, r.activations, nodes=4)
        best = search(model, on, work, gains=False, nodes=4).best
        out.append({"model": model.name, "published": FOUR_NODES_PUBLISHED[size][0],
                    "policy": evaluate(model, on, work, plan).tokens_per_s, "searched": best.prediction.tokens_per_s,
                    "block": [best.plan.rows, best.plan.runs, best.plan.chunk],
                    "bottleneck": best.prediction.bottleneck})  # fmt: skip
    return out


def ablations(m: Machine) -> list[dict[str, Any]]:
    """Variations of the 512+32 policies that the paper measured."""
    big, mid = POLICIES["175b", 512, False], POLICIES["30b", 512, False]
    cases = (
        ("30b, no overlap", "30b", m, dataclasses.replace(mid, overlap=False), 5.86),
        ("175b, no overlap", "175b", m, dataclasses.replace(big, overlap=False), 0.59),
        ("175b, one run a block", "175b", m, dataclasses.replace(big, runs=1), 0.27),
        ("175b, disk 0.5/0.5 GB/s", "175b", with_disk(m, "disk", 0.5e9, 0.5e9), big, 0.30),
        ("175b, disk 2/1 GB/s (the paper's hardware table)", "175b", with_disk(m, "disk", 2e9, 1e9), big, 0.69),
    )
    out = []
    for what, size, on, policy, published in cases:
        t = FlexGen(opt(size), on, Workload(512, 32, policy.rows * policy.runs), policy).timing()
        out.append({"case": what, "published": published, "predicted": t.tokens_per_s})
    return out


def ours(m: Machine, batch: int = 1024) -> list[dict[str, Any]]:
    """Our search and the published policy, both under our own model of the same machine (weights and cache bits
    alike), and for 128+128, where none is published, the search alone."""
    out = []
    for system in ("flexgen", "flexgen 4-bit"):
        for length in LENGTHS:
            for i, size in enumerate(SIZES):
                four = system.endswith("4-bit")
                model = opt(size, 4.5 if four and size != "30b" else 16)
                bits, work = 4 if four else 16, Workload(*length, batch)
                found = search(model, m, work, gains=False, k_bits=bits, v_bits=bits)
                best, policy = found.best, policy_of(system, size, length)
                row = {"system": system, "model": model.name, "prompt": length[0], "generated": length[1],
                       "published": PUBLISHED[system][length][i], "searched": best.prediction.tokens_per_s,
                       "block": [best.plan.rows, best.plan.runs, best.plan.chunk],
                       "places": [[n, *dataclasses.astuple(p)] for p, n in Counter(best.plan.places).items()],
                       "bottleneck": best.prediction.bottleneck}  # fmt: skip
                if policy is not None:
                    r = placed(model, policy.percent, host_attention=policy.host_attention)
                    plan = Plan(
                        model.name, m.name, policy.rows, policy.runs, length[0], r.places, r.activations, bits, bits
                    )
                    theirs = evaluate(model, m, work, plan)
                    row |= {"policy": theirs.tokens_per_s, "realised_percent": r.percent,
                            "policy_fits_ours": all(theirs.peak(t.name) <= t.capacity for t in m.tiers)}  # fmt: skip
                out.append(row)
    return out


def busy(p: Prediction) -> float:
    """Share of the time the device computes."""
    used = p.passes * p.terms["prefill"]["compute device"] + (p.work.gen_len - 1) * p.terms["decode"]["compute device"]
    return used / p.block_seconds


def tiered() -> list[dict[str, Any]]:
    """OPT-66B whose weights don't fit the host: a far tier of CXL memory against the same bytes on NVMe."""
    cxl = machine("a10")
    nvme = with_disk(cxl, "far", 6.5e9, 5e9)
    out = []
    for batch in (8, 16, 32, 64, 128):
        work = Workload(512, 32, batch)
        a, b = (search(opt("66b"), on, work, gains=False).best.prediction for on in (nvme, cxl))
        out.append({"batch": batch, "nvme_s": a.total, "cxl_s": b.total, "ratio": b.total / a.total,
                    "gpu_nvme": busy(a), "gpu_cxl": busy(b)})  # fmt: skip
    return out


def show(report: dict[str, Any]) -> str:
    """The report as tables."""
    head = ("system", "model", "lengths", "published", "predicted", "error", "")
    rows = []
    for c in report["table"]:
        error = c.get("error")
        note = "" if error is None or not c["system"].startswith("flexgen") else "" if abs(error) <= WITHIN else "miss"
        rows.append((c["system"], c["model"], f"{c['prompt']}+{c['generated']}",
                     "OOM" if c["published"] is None else f"{c['published']:g}",
                     f"{c['predicted']:.4g}" if "predicted" in c else "no policy",
                     "" if error is None else f"{error:+.0%}", note))  # fmt: skip
    within, total = report["within_25_percent"]
    parts = [lines([head, *rows]), f"FlexGen's cells with a published policy within 25%: {within} of {total}."]
    parts.append("Four nodes (tokens/s, whole and decoding alone):\n" + lines(
        [("model", "published", "predicted", "published", "predicted")]
        + [(c["model"], c["published"], f"{c['predicted']:.2f}", c["published_decode"], f"{c['predicted_decode']:.2f}")
           for c in report["four_nodes"]]))  # fmt: skip
    parts.append("Ablations (512+32):\n" + lines(
        [("case", "published", "predicted")]
        + [(c["case"], c["published"], f"{c['predicted']:.3g}") for c in report["ablations"]]))  # fmt: skip
    if "ours" in report:
        parts.append("Our model of a good engine on the same machine (tokens/s):\n" + lines(
            [("system", "model", "lengths", "published", "its policy", "our search", "rows x runs")]
            + [(c["system"], c["model"], f"{c['prompt']}+{c['generated']}", c["published"],
                f"{c['policy']:.3g}" if "policy" in c else "none", f"{c['searched']:.3g}",
                f"{c['block'][0]} x {c['block'][1]}") for c in report["ours"]]))  # fmt: skip
        parts.append("Our pipeline of four such nodes, 512+32, fp16 (tokens/s):\n" + lines(
            [("model", "published", "its policy", "our search", "rows x runs")]
            + [(c["model"], c["published"], f"{c['policy']:.3g}", f"{c['searched']:.3g}",
                f"{c['block'][0]} x {c['block'][1]}") for c in report["our_four_nodes"]]))  # fmt: skip
        parts.append("OPT-66B, CXL memory instead of NVMe (seconds; share of time the GPU computes):\n" + lines(
            [("batch", "NVMe", "CXL", "ratio", "GPU, NVMe", "GPU, CXL")]
            + [(c["batch"], f"{c['nvme_s']:.0f}", f"{c['cxl_s']:.0f}", f"{c['ratio']:.2f}", f"{c['gpu_nvme']:.1%}",
                f"{c['gpu_cxl']:.1%}") for c in report["tiered"]]))  # fmt: skip
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="OUT", help="also write the numbers there; - for standard output")
    parser.add_argument("--quick", action="store_true", help="leave out the searches (minutes)")
    args = parser.parse_args()
    m = machine()
    cells = table(m)
    report: dict[str, Any] = {"machine": dict(m.sources), "table": cells, "within_25_percent": counted(cells),
                              "four_nodes": pipeline(m), "ablations": ablations(m)}  # fmt: skip
    if not args.quick:
        report |= {"ours": ours(m), "our_four_nodes": our_pipeline(m), "tiered": tiered()}
    if args.json == "-":
        json.dump(report, sys.stdout, indent=1)
        return
    print(show(report))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
