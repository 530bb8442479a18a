"""``headrace plan``: what a model would do on this machine under a limit, before it is loaded or even fetched."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace import config, system
from headrace.cli.generation import described, writable, write_file
from headrace.cli.options import KV_HELP, REQUANT_HELP
from headrace.cli.parser import kv_bits, size, whole
from headrace.cli.planned import MACHINE_HELP
from headrace.cli.show import note
from headrace.errors import BadRequest, OverBudget

if TYPE_CHECKING:
    from headrace.kernels.device import Device
    from headrace.model.layers import Model
    from headrace.options import Options
    from headrace.plan.cost import Prediction
    from headrace.plan.machine import Machine
    from headrace.plan.search import Candidate, Found
    from headrace.plan.sizes import ModelCost, Workload

LONG = 512, 32, 64
"""Prompt tokens, new tokens and sequences when nothing is said."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Says what a model would do under a limit: tokens/s, time to the first token, bytes in every tier, what binds, "
        "the next best plans and why they lost, and what more memory or a faster disk would bring. Nothing is loaded: "
        "a model file, a folder, a bare config.json or hf:ORG/REPO will do, of which only the configuration is "
        "fetched. `run`, `chat`, `batch` and `bench` with the same --ram choose by the same search."
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a .gguf file, a Hugging Face folder, a config.json, or a name as -m takes it")
    add("--ram", type=size, metavar="SIZE", help="the most memory to use, like 2G (default: what is free now)")
    add("--prompt-len", type=whole(1), default=LONG[0], metavar="N", help=f"tokens of a prompt (default {LONG[0]})")
    add("--gen-len", type=whole(1), default=LONG[1], metavar="N", help=f"new tokens (default {LONG[1]})")
    batch = f"sequences in all (default {LONG[2]}, or 1 for latency)"
    add("--batch", type=whole(1), metavar="N", help=batch)
    objective = "least seconds for all of it, or least mean wait for an answer (default throughput)"
    add("--objective", choices=("throughput", "latency"), default="throughput", help=objective)
    add("--kv-bits", type=kv_bits, default=(16, 16), metavar="K/V", help=KV_HELP)
    add("--requant", choices=("q4", "q8"), help=REQUANT_HELP)
    add(
        "--format",
        metavar="FMT",
        help="of a bare config.json: plan for matrices stored so, like Q4_K (default: as it says)",
    )
    add("-c", "--context", type=whole(2), metavar="N", help="tokens one sequence may have (default: as for run)")
    add("-t", "--threads", type=whole(1, 1024), metavar="N", help="threads that compute (default: one per core)")
    percent = (
        "FlexGen's six numbers: percent of the weights, the cache and the activations on the device (WG CG HG) and in "
        "memory (WC CC HC), the rest on disk; to within a layer"
    )
    add("--percent", type=whole(0, 100), nargs=6, metavar=("WG", "WC", "CG", "CC", "HG", "HC"), help=percent)
    group = parser.add_argument_group("machine")
    group.add_argument("--machine", type=Path, metavar="FILE", help=MACHINE_HELP)
    group.add_argument("--probe", action="store_true", help="measure the machine again first")
    group.add_argument(
        "--disk-rate", type=size, metavar="RATE", help="bytes/s the disk reads, like 2G, instead of measuring"
    )
    device = "memory of the device that --machine describes, which then plans for it with HiGHS"
    group.add_argument("--device-ram", type=size, metavar="SIZE", help=device)
    group = parser.add_argument_group("result")
    group.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the plan, for --plan of the other commands"
    )
    group.add_argument("--json", action="store_true", help="everything as JSON")


def run(args: argparse.Namespace) -> int:
    from headrace.kernels.dispatch import make_device
    from headrace.plan.sizes import Workload

    writable(args.output, "plan")
    if args.machine is not None and args.probe:
        raise BadRequest("--probe measures this machine and --machine brings another's constants; leave one out.")
    batch = args.batch or (1 if args.objective == "latency" else LONG[2])
    work = Workload(args.prompt_len, args.gen_len, batch)
    device = make_device(threads=args.threads or system.cores(), cpu=config.resolve().cpu)
    with opened(args, device) as model:
        options, machine = setting(args, device, model, work)
        if any(tier.name == "device" for tier in machine.tiers):
            answer = on_a_device(args, device, model, options, machine)
        else:
            answer = on_the_cpu(args, device, model, options, machine)
    cost, machine, found, more = answer
    if args.output is not None:
        write_file(args.output, found.best.plan.to_json() + "\n")
    if args.json:
        print(json.dumps({**report(cost, machine, found), **more}, indent=1))
        return 0
    from headrace.plan.explain import explain

    print(explain(cost, machine, found))
    for line in more.get("realised", []):
        print(f"\n{line}")
    if args.output is not None:
        note(f"written to {args.output}; --plan {args.output} runs it")
    return 0


@contextmanager
def opened(args: argparse.Namespace, device: Device) -> Iterator[Model]:
    """The model, or what its configuration alone says of it."""
    from headrace.formats.index import open_model
    from headrace.formats.requant import requantise
    from headrace.model.layers import load_model
    from headrace.planning import imagined
    from headrace.text.tokenizer import Tokenizer

    importlib.import_module("headrace.engine")  # so that what the program takes is what it takes when it runs
    with described(args.model) as (path, _), open_model(path) as file:
        if not file.tensors:
            yield imagined(file, known_format(args.format), args.requant)
            return
        if args.format is not None:
            raise BadRequest("--format is for a bare configuration; this model's weights are here. See --requant.")
        tokenizer = Tokenizer.from_metadata(file.metadata)  # it takes memory that a run has to have too
        yield load_model(requantise(file, args.requant) if args.requant else file)
        del tokenizer


def known_format(name: str | None) -> str | None:
    """BadRequest for a storage format that we don't compute with."""
    from headrace.formats.tensor import KNOWN

    fmt = name and name.upper()
    if fmt is not None and fmt not in KNOWN:
        raise BadRequest(f"--format {name} is not known; choose one of {', '.join(sorted(KNOWN))}.")
    return fmt


def setting(args: argparse.Namespace, device: Device, model: Model, work: Workload) -> tuple[Options, Machine]:
    """The options that are given, and the machine."""
    from headrace.options import Choice, Options
    from headrace.planning import machine_for

    most = args.context or model.spec.context
    if work.prompt_len + work.gen_len > most:
        raise BadRequest(
            f"{work.prompt_len} + {work.gen_len} tokens don't fit into the context of {most}; "
            "give a smaller --prompt-len or --gen-len, or a larger -c where the model has it."
        )
    choice = Choice(work, args.objective, machine=args.machine)
    ram = args.ram or system.memory().usable
    options = Options(
        ram=ram, context=args.context, kv_bits=args.kv_bits, requant=args.requant, choice=choice, tell=note
    )
    machine = machine_for(device, model, options, float(args.disk_rate or 0), args.probe)
    names = [tier.name for tier in machine.tiers]
    if args.disk_rate and "disk" not in names:
        raise BadRequest(f"--disk-rate: the machine of {args.machine} has no disk; leave it out.")
    if args.disk_rate and args.machine is not None:
        machine = machine.faster("disk", args.disk_rate / machine.tier("disk").read)
    if args.device_ram is not None and "device" not in names:
        raise BadRequest("--device-ram needs a machine with a device; describe one (--machine FILE), or leave it out.")
    return options, machine


def on_the_cpu(
    args: argparse.Namespace, device: Device, model: Model, options: Options, machine: Machine
) -> tuple[ModelCost, Machine, Found, dict[str, Any]]:
    from headrace.planning import Planner, percent_places

    if args.percent is not None:
        from headrace.plan.flexgen import checked, comes_out

        options = replace(options, places=percent_places(model, checked(args.percent)))
    planner = Planner(device, model, options, machine, name_of(args, model))
    found, shape = planner.search()
    more: dict[str, Any] = {
        "options": {name: getattr(shape.options, name) for name in ("rows", "runs", "sequences", "slots", "kv_frames")}
    }
    if args.percent is not None:
        blocks, plan = planner.sizes.blocks, found.best.plan
        weights = 1 - shape.streamed / len(blocks)
        extents = len(blocks) * plan.slots // 32
        cache = min(1.0, plan.frames / extents) if shape.options.kv_disk is not None else 1.0
        more["realised"] = [comes_out(args.percent, (0, 100 * weights, 0, 100 * cache, 0, 100))]
    known = machine if options.ram is None else machine.with_tier("host", capacity=options.ram)
    return planner.cost, known, found, more


def on_a_device(
    args: argparse.Namespace, device: Device, model: Model, options: Options, machine: Machine
) -> tuple[ModelCost, Machine, Found, dict[str, Any]]:
    """With a device in front of the host: the plan is the integer programme's (``plan/search.py``)."""
    from headrace.plan.search import search
    from headrace.planning import cost_of

    assert options.choice is not None
    cost = cost_of(device, model, name_of(args, model))
    for name, given in (("device", args.device_ram), ("host", args.ram)):
        machine = machine.with_tier(name, capacity=given) if given else machine
    (k, v), work, objective = options.kv_bits, options.choice.work, options.choice.objective
    if args.percent is None:
        return cost, machine, search(cost, machine, work, objective=objective, k_bits=k, v_bits=v), {}
    return _pinned(args, cost, machine, options)


def _pinned(
    args: argparse.Namespace, cost: ModelCost, machine: Machine, options: Options
) -> tuple[ModelCost, Machine, Found, dict[str, Any]]:
    """FlexGen's six numbers as the places, and of the block shapes the best that fits."""
    from headrace.plan.cost import evaluate
    from headrace.plan.flexgen import comes_out, placed
    from headrace.plan.plan import Plan
    from headrace.plan.search import Candidate, Found, shapes

    assert options.choice is not None
    (k, v), work = options.kv_bits, options.choice.work
    real = placed(cost, args.percent)
    found, refusal = [], None
    for knobs in shapes(cost, machine, work, k, v, 1):
        if knobs.activations != real.activations:
            continue
        plan = Plan(cost.name, machine.name, places=real.places, **asdict(knobs))
        try:
            p = evaluate(cost, machine, work, plan).check(machine)
        except OverBudget as error:
            refusal = refusal or error
            continue
        found.append(Candidate(plan, p, p.total if options.choice.objective == "throughput" else p.wait))
    if not found:
        raise refusal or BadRequest("--percent: activations can't lie there on this machine.")
    best = min(found, key=lambda c: c.seconds)
    return cost, machine, Found(best, (), (), "percent"), {"realised": [comes_out(args.percent, real.percent)]}


def name_of(args: argparse.Namespace, model: Model) -> str:
    """A bare configuration is called after its folder or its place on the hub."""
    file = model.file
    if file.tensors and file.paths:
        return str(file.paths[0].stem)
    return str(args.model) if args.model.startswith("hf:") else Path(args.model).resolve().parent.name


def report(cost: ModelCost, machine: Machine, found: Found) -> dict[str, Any]:
    """Everything as plain data; "plan" is what --plan reads."""

    def one(c: Candidate) -> dict[str, Any]:
        return {"plan": json.loads(c.plan.to_json()), "prediction": numbers(c.prediction), "why": c.why}

    return {
        "model": cost.name,
        "machine": machine.name,
        **one(found.best),
        "others": [one(c) for c in found.others],
        "gains": {g.what: g.ratio for g in found.gains},
        "solver": found.solver,
    }


def numbers(p: Prediction) -> dict[str, Any]:
    return {
        "tokens_per_s": p.tokens_per_s,
        "ttft_s": p.ttft,
        "seconds_between_tokens": p.itl,
        "seconds": p.total,
        "bottleneck": p.bottleneck,
        "bytes": p.memory,
        "seconds_a_pass": p.terms,
    }
