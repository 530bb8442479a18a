"""``headrace flexgen``: the command line of FlexGen's ``flex_opt``, each flag honoured or refused with a reason."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace import config, system
from headrace.cli import generation as g
from headrace.cli.device import add_device, device_of
from headrace.cli.parser import size, whole
from headrace.cli.show import note
from headrace.errors import BadFile, BadRequest
from headrace.plan.flexgen import ALL_DEVICE

if TYPE_CHECKING:
    from headrace.jobs.flexgen import Policy


def yes(text: str) -> bool:
    """1, true, yes, t, y and their opposites."""
    word = text.lower()
    if word in ("1", "true", "yes", "t", "y"):
        return True
    if word in ("0", "false", "no", "f", "n"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


_YES = {"type": yes, "nargs": "?", "const": True, "metavar": "BOOL"}
_SWITCH = {"action": "store_true"}
HOW: Mapping[str, Mapping[str, Any]] = {
    "--model": {"default": "facebook/opt-6.7b", "metavar": "NAME"},
    "--path": {"type": Path, "default": Path("~/opt_weights"), "metavar": "DIR"},
    "--offload-dir": {"type": Path, "metavar": "DIR"},
    "--prompt-len": {"type": whole(1), "default": 512, "metavar": "N"},
    "--gen-len": {"type": whole(1), "default": 32, "metavar": "N"},
    "--cut-gen-len": {"type": whole(2), "metavar": "N"},
    "--debug-mode": {"metavar": "MODE"},
    "--gpu-batch-size": {"type": whole(1), "default": 4, "metavar": "N"},
    "--num-gpu-batches": {"type": whole(1), "default": 1, "metavar": "N"},
    "--percent": {"type": int, "nargs": 6, "default": ALL_DEVICE, "metavar": ("WG", "WC", "CG", "CC", "HG", "HC")},
    "--sep-layer": _YES,
    "--pin-weight": _YES,
    "--cpu-cache-compute": _SWITCH,
    "--attn-sparsity": {"type": float, "default": 1.0, "metavar": "P"},
    "--compress-weight": _SWITCH,
    "--compress-cache": _SWITCH,
    "--overlap": {**_YES, "default": True},
    "--log-file": {"metavar": "FILE"},
    "--no-log": _SWITCH,
    "--verbose": {"type": whole(0), "default": 2, "metavar": "N"},
}
"""FlexGen's flags, as argparse takes them."""


def flags() -> Iterator[tuple[str, str, str]]:
    """(flag, what becomes of it, how or why not), from the file beside this one; docs/flexgen.md is made from it."""
    for line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines():
        name, here, text = line.split(" | ")
        yield name, here, text


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Takes the command line of FlexGen's benchmark (python -m flexgen.flex_opt), flags shortened as there, and "
        "runs it: gpu-batch-size x num-gpu-batches prompts of one length, so many tokens each, through the block it "
        "describes. Prints its latencies and throughputs as measured here; docs/flexgen.md tells more."
    )
    parser.allow_abbrev = True  # as there: its own scripts write --cpu and --comp-weight
    group = parser.add_argument_group("FlexGen's flags")
    for name, here, text in flags():
        group.add_argument(name, help=f"{here}: {text}", **HOW[name])
    ours = parser.add_argument_group("Headrace's")
    add_device(ours, default=None)
    ours.add_argument(
        "-t", "--threads", type=whole(1), metavar="N", help="threads that compute (default: one per core)"
    )
    ours.add_argument(
        "--ram", type=size, metavar="SIZE", help="the most host memory to use; refused when it isn't enough"
    )


def run(args: argparse.Namespace) -> int:
    check(args)
    if args.log_file is not None and not args.no_log:
        g.writable(Path(args.log_file), "log")
    args.device = args.device or nearest()
    sparsity = args.attn_sparsity
    args.pin_weight = bool(args.pin_weight)
    path = find_model(args)
    folder = (args.offload_dir or config.resolve().cache / "offload").expanduser()
    from headrace.engine import load
    from headrace.jobs import flexgen
    from headrace.options import Options

    policy = flexgen.Policy(args.gpu_batch_size, args.num_gpu_batches, args.percent, args.prompt_len, args.gen_len)
    packs = None if args.offload_dir is None else folder
    options = Options(
        **device_of(args), threads=args.threads or system.cores(), ram=args.ram, overlap=args.overlap, packs=packs,
        requant="q4" if args.compress_weight else None, kv_bits=(4, 4) if args.compress_cache else (16, 16), tell=note,
    )  # fmt: skip
    options, shares = flexgen.carried_out(path, policy, folder, options)
    note(f"device {args.device}. {shares}")
    with g.waiting(f"loading {path.name}"):
        engine = load(path, options)
    with engine:
        if sparsity < 1:
            note(
                f"An approximation: attention over {100 * sparsity:g}% of the values; the model is {engine.parts.name}."
            )
        with g.interruptible(engine):
            done = flexgen.measure(engine, policy, min(args.cut_gen_len or args.gen_len, args.gen_len))
        lines = [f"{engine.parts.name} on {args.device}", shares, *flexgen.report(engine, done)]
    tell(args, policy, lines, [c.text for c in done.completions])
    return 0


def check(args: argparse.Namespace) -> None:
    """BadRequest for what is refused."""
    if args.debug_mode is not None:
        raise BadRequest(
            "--debug-mode is refused: it times a part and multiplies, and whole runs are timed here; leave it out, and "
            "use --cut-gen-len for a shorter run."
        )
    if args.sep_layer:
        raise BadRequest(
            "--sep-layer is refused: a block's attention and feed-forward are one layer here; leave it out."
        )
    if not 0 < args.attn_sparsity <= 1:
        raise BadRequest(f"--attn-sparsity is {args.attn_sparsity}; give a fraction over 0 and at most 1.")


def nearest() -> str:
    """cuda where there is a GPU; else torch:cpu, which has its tiers, where PyTorch is; else the CPU."""
    if importlib.util.find_spec("torch") is None:
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "torch:cpu"


def find_model(args: argparse.Namespace) -> Path:
    """The folder under --path, or what the name means elsewhere."""
    text: str = args.model
    last = text.rsplit("/", 1)[-1]
    root: Path = args.path.expanduser()
    if Path(text).exists():
        return Path(text)
    for folder in (root / last, root / text):
        if (folder / "config.json").exists():
            return folder
    if (root / f"{last}-np").is_dir():
        raise BadFile(
            f"{root / last}-np: holds arrays that FlexGen converted; put the model's Hugging Face folder into "
            f"{root / last}, it is read as it is."
        )
    on_a_hub = "/" in text and not text.startswith("hf:") and not text.startswith(("/", "."))
    return g.find_named(f"hf:{text}" if on_a_hub else text)


def tell(args: argparse.Namespace, policy: Policy, lines: list[str], texts: list[str]) -> None:
    """Figures and texts to standard output, figures to the log."""
    if args.verbose >= 2:
        for i in sorted({0, len(texts) - 1}):
            print(f"{i}: {texts[i]!r}")
    if args.verbose >= 1:
        print("\n".join(lines))
    if args.log_file is not None and not args.no_log:
        shape = f"gbs{policy.rows}-ngbs{policy.runs}-prompt{policy.prompt_len}-gen{policy.gen_len}"
        percent = "-".join(map(str, policy.percent))
        auto = f"headrace-{args.model.rsplit('/', 1)[-1]}-{shape}-percent-{percent}.log"
        path = Path(auto if args.log_file == "auto" else args.log_file)
        with path.open("a", encoding="utf-8") as log:
            log.write("\n".join(lines) + "\n")
