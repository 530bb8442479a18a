"""Plans for the commands that run one: --plan and --machine, what the planner may choose, predicted beside measured."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import BadRequest

if TYPE_CHECKING:
    from headrace.engine import Engine
    from headrace.options import Options
    from headrace.plan.cost import Prediction

MACHINE_HELP = "constants of the machine, as `check --probe` keeps them (default: measured once, then kept)"
TEMPLATE = 32
"""Tokens a chat template adds, about."""
BYTES = 4
"""Of text a token, about: good enough to plan for a text before there is a tokenizer."""
ANSWER = 256
"""Tokens of an answer whose length nobody has said."""


def add_planned(group: argparse._ActionsContainer) -> None:
    text = (
        "run as this plan says (`headrace plan -o FILE`); without one, --ram lets the planner choose what isn't given"
    )
    group.add_argument("--plan", type=Path, metavar="FILE", help=text)
    text = f"with --ram or --plan, or of this rank: {MACHINE_HELP}"
    group.add_argument("--machine", type=Path, metavar="FILE", help=text)


def choosing(args: argparse.Namespace, options: Options, work: tuple[int, int, int], free: Collection[str]) -> Options:
    """The options with what the planner may choose of them, for (prompt tokens, new tokens, sequences)."""
    from headrace.options import Choice
    from headrace.plan.sizes import Workload

    undecided = args.ram is None and args.plan is None and args.link is None
    if args.machine is not None and (undecided or options.drafter or args.device != "cpu"):
        raise BadRequest("--machine is for --ram and --plan on the CPU without a drafter; leave it out.")
    load = Workload(*(max(1, n) for n in work))
    may = frozenset(free) | ({"kv_disk"} if options.kv_frames is None else frozenset())
    choice = Choice(load, "latency" if load.batch == 1 else "throughput", may, args.machine)
    if args.plan is None:
        return replace(options, choice=choice)
    if args.link is not None:
        raise BadRequest("--plan is for one process; under mpirun give each rank's --ram instead.")
    from headrace.planning import pinned, read_plan

    plan = read_plan(args.plan)
    if options.kv_bits not in ((16, 16), (plan.k_bits, plan.v_bits)):
        raise BadRequest(f"{args.plan} is for {plan.k_bits}/{plan.v_bits} KV bits; leave --kv-bits out, or plan anew.")
    made = pinned(options, plan)
    if options.kv_frames is not None or (options.kv_disk is not None and made.kv_disk is None):
        raise BadRequest(f"{args.plan} says where the cache is; leave --kv-disk and --kv-frames out, or plan anew.")
    return replace(made, choice=replace(choice, free=frozenset()))


def tokens_of(text: str) -> int:
    """About how many tokens a text has."""
    return len(text.encode(errors="replace")) // BYTES + TEMPLATE


def outlook(path: Path, most: int = 256) -> tuple[int, int, int]:
    """(prompt tokens, new tokens, rows) of a batch file by its first rows, about; errors are others' to tell."""
    rows = 0
    prompts: list[int] = []
    answers: list[int] = []
    try:
        with path.open("rb") as file:
            for line in file:
                rows += bool(line.strip())
                if len(prompts) < most:
                    prompt, answer = _row(line)
                    prompts.append(prompt)
                    answers.append(answer)
    except OSError:
        pass
    if not prompts:
        return ANSWER, ANSWER, max(1, rows)
    return sum(prompts) // len(prompts), sum(answers) // len(answers), max(1, rows)


def _row(line: bytes) -> tuple[int, int]:
    try:
        body = json.loads(line)["body"]
        answer = body.get("max_completion_tokens") or body.get("max_tokens") or ANSWER
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return len(prompt), int(answer)
        texts = [str(m["content"]) for m in body["messages"]] if prompt is None else [str(prompt)]
        return sum(map(tokens_of, texts)), int(answer)
    except (ValueError, KeyError, TypeError, AttributeError):
        return ANSWER, ANSWER


def expected(engine: Engine, prompt: int, new: int, sequences: int = 1) -> Prediction | None:
    """What the plan that decided should have taken for this work."""
    if engine.parts.expect is None or min(prompt, new, sequences) < 1:
        return None
    from headrace.plan.sizes import Workload

    return engine.parts.expect(Workload(prompt, new, sequences))


def expected_line(p: Prediction) -> str:
    """Short, to stand beside what was measured."""
    if p.work.batch > 1:
        from headrace.plan.plan import figure

        return f"plan {figure(p.tokens_per_s)} tokens/s"
    return f"plan {p.ttft:.2f} s, then {1 / p.itl:.1f}/s"


def expected_json(p: Prediction) -> dict[str, Any]:
    return {
        "ttft_s": p.ttft,
        "decode_tokens_per_s": p.work.batch / p.itl,
        "tokens_per_s": p.tokens_per_s,
        "bottleneck": p.bottleneck,
    }
