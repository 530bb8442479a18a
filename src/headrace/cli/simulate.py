"""``headrace simulate``: what a cluster would do, before there is one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.generation import find_named, writable, write_file
from headrace.cli.parser import real, whole
from headrace.errors import BadRequest

if TYPE_CHECKING:
    from headrace.simulate.cluster import Cluster, Strategy
    from headrace.simulate.files import Sizes
    from headrace.simulate.report import Report

POLICIES = ("ours", "plain", "sync", "pipeinfer")
SHOWN = 16
"""Passes of the plain pipeline that a timeline shows."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Predicts what a cluster would do with a model: tokens/s, times to and between tokens, how busy each node is. "
        "Head, stages, drafter and policies are the very code that runs; only time, links and arithmetic are "
        "imitated.\n\n"
        "CLUSTER.toml says how fast nodes and links are (docs/speculation.md; an example is "
        "benchmarks/data/eight_nodes.toml). The drafter has a node of its own beside those. A model is a file, a bare "
        "config.json, or a count of parameters like 70B."
    )
    add = parser.add_argument
    add("cluster", type=Path, metavar="CLUSTER.toml", help="nodes and links")
    add("--model", metavar="MODEL", help="the target; its bytes and the nodes' rates give the time of a layer")
    add("--draft", metavar="MODEL", help="the draft model (default: none, unless the file has draft_time)")
    accepted = "how often the draft's first choice is right, like 0.7, or a file recorded from a real pair"
    add("--acceptance", metavar="A", help=accepted)
    policies = f"how to speculate; several, separated by commas, are compared: {', '.join(POLICIES)} (default: ours)"
    add("--policy", type=_policies, default=("ours",), metavar="P", help=policies)
    length = "tokens of a draft of sync, or of a microbatch of pipeinfer (default: 4)"
    add("--draft-tokens", type=whole(1, 512), metavar="N", help=length)
    add("--bits", type=real(0, 32, above=True), metavar="B", help="bits a weight, where no file says it (default: 4.5)")
    add("-n", "--tokens", type=whole(2, 10**6), default=256, metavar="N", help="new tokens (default: 256)")
    add("--prompt-tokens", type=whole(1, 10**6), default=16, metavar="N", help="tokens of a prompt (default: 16)")
    add("--prompts", type=whole(1, 10**4), default=1, metavar="N", help="requests at the same time (default: 1)")
    add("--seed", type=whole(0), metavar="N", help="which guesses are right (default: 0)")
    add("--json", action="store_true", help="everything as JSON")
    lanes = f"a picture of {SHOWN} passes, a lane for each stage: .html, or .svg for one policy"
    add("--timeline", type=Path, metavar="FILE", help=lanes)
    trace = (
        "one policy's whole run for ui.perfetto.dev or chrome://tracing, JSON; `headrace run --trace` writes the same"
    )
    add("--trace", type=Path, metavar="FILE", help=trace)


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in POLICIES:
            raise argparse.ArgumentTypeError(f"{name!r} is no policy; choose from {', '.join(POLICIES)}")
    return names


def run(args: argparse.Namespace) -> int:
    from headrace.simulate.cluster import run_simulation
    from headrace.simulate.files import load_cluster, load_ranks

    _check(args)
    writable(args.timeline, "timeline")
    writable(args.trace, "trace")
    model, draft = _sizes(args.model, args), _sizes(args.draft, args)
    cluster = load_cluster(args.cluster, model, draft)
    guessing = [p for p in args.policy if p != "plain"]
    if guessing and not cluster.draft_time:
        raise BadRequest(f"--policy {guessing[0]} needs a drafter: give --draft, or draft_time in {args.cluster}.")
    if guessing and args.acceptance is None:
        raise BadRequest("How good is the draft? Give --acceptance, like 0.7.")
    ranks = load_ranks(args.acceptance or "0", args.seed or 0)
    reports = [
        run_simulation(cluster, ranks, strategy, args.tokens, args.prompt_tokens, spans=True, prompts=args.prompts)
        for strategy in (_strategy(name, args) for name in args.policy)
    ]
    if args.json:
        print(json.dumps({"cluster": _facts(cluster), "runs": [r.data() for r in reports]}, indent=1))
    else:
        print("\n".join(r.lines() for r in reports))
    _draw(args, cluster, reports)
    return 0


def _check(args: argparse.Namespace) -> None:
    """What can't be meant together."""
    kinds = {"sync", "pipeinfer"}
    if args.draft_tokens is not None and not kinds & set(args.policy):
        raise BadRequest(
            f"--draft-tokens is for --policy {' and '.join(sorted(kinds))}; ours measures how far to guess."
        )
    if set(args.policy) == {"plain"} and (args.draft or args.acceptance):
        raise BadRequest("--policy plain has no drafter; leave --draft and --acceptance out.")
    if args.seed is not None and (args.acceptance is None or Path(args.acceptance).exists()):
        raise BadRequest("--seed is for an --acceptance like 0.7, where it says which guesses are right; leave it out.")
    if args.trace and len(args.policy) > 1:
        raise BadRequest("--trace writes one run; give one policy.")
    if args.timeline and args.timeline.suffix not in (".html", ".svg"):
        raise BadRequest(f"{args.timeline}: a timeline is an .html or .svg file.")
    if args.timeline and args.timeline.suffix == ".svg" and len(args.policy) > 1:
        raise BadRequest(f"{args.timeline}: an .svg shows one run; give one policy, or an .html file.")


def _sizes(text: str | None, args: argparse.Namespace) -> Sizes | None:
    from headrace.simulate.files import by_count, by_file

    if text is None:
        return None
    if counted := by_count(text, args.bits or 4.5):
        return counted
    return by_file(find_named(text), args.bits)


def _strategy(name: str, args: argparse.Namespace) -> Strategy:
    from headrace.simulate.cluster import ours, pipeinfer, plain, synchronous
    from headrace.speculate.pipeinfer import Knobs

    length = args.draft_tokens or 4
    if name == "sync":
        return synchronous(length)
    return pipeinfer(Knobs(length, 1, 0.001, 0.2)) if name == "pipeinfer" else ours() if name == "ours" else plain()


def _names(cluster: Cluster) -> list[str]:
    return [f"stage {i}, {n} layers" for i, n in enumerate(cluster.layers)] + ["drafter"] * (cluster.draft_time > 0)


def _facts(cluster: Cluster) -> dict[str, object]:
    return {
        "layers": cluster.layers,
        "layer_time_s": cluster.layer_time,
        "draft_time_s": cluster.draft_time,
        "link_bytes_per_s": cluster.link.rate,
        "link_latency_s": cluster.link.latency,
        "width": cluster.width,
    }


def _draw(args: argparse.Namespace, cluster: Cluster, reports: list[Report]) -> None:
    from headrace.run.trace import chrome_trace
    from headrace.simulate.report import timeline_html, timeline_svg

    names, first = _names(cluster), reports[0]
    end = first.ttft + SHOWN * cluster.speed().passing(1)
    assert first.seen is not None
    if args.timeline:
        picture = (
            timeline_svg(first.seen, names, first.stages, first.ttft, min(end, first.seconds))
            if args.timeline.suffix == ".svg"
            else timeline_html([(r, names) for r in reports], first.ttft, end)
        )
        write_file(args.timeline, picture)
    if args.trace:
        write_file(args.trace, chrome_trace(first.seen, names[: first.stages + (first.launched > 0)], first.stages))
