"""Options that several commands share: the model, what it may use, how tokens are chosen."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from headrace.cli.device import add_device, add_more
from headrace.cli.drafting import add_drafting
from headrace.cli.parser import kv_bits, real, size, thread_counts, whole
from headrace.cli.planned import add_planned
from headrace.run.types import Sampling
from headrace.store import known

DEFAULT_TOKENS = 1024
MODEL_HELP = (
    f"a .gguf file, a Hugging Face folder, hf:ORG/REPO[:FILE], or a known model's name ({', '.join(known.KNOWN)}); "
    f"default {known.DEMO.name}, fetched when it isn't there ({known.DEMO.nbytes / 1e6:.0f} MB)"
)
KV_HELP = (
    "bits of the cached keys and values: 16/16 (default), 8/8, 8/4, 4/4. Fewer bits make a slightly different model: "
    "8/4 cost 0.6%% perplexity on SmolLM2, 4/4 5 to 11%%"
)
REQUANT_HELP = (
    "quantise the matrices of an f16, bf16 or f32 model as they are read; q8 is Q8_0, q4 about 5 bits a weight (docs/"
    "memory.md has what it costs). It is then another model, called NAME-q4 or NAME-q8"
)
KV_DISK_HELP = (
    "keep the cache in a nameless file in DIR and only what is being used in memory: for contexts or batches whose "
    "cache doesn't fit. The text stays the same; each pass reads what doesn't stay"
)
KV_FRAMES_HELP = "with --kv-disk: pages (32 tokens of a layer) in memory (default: what two runs need)"
RAM_HELP = "the most memory to use, like 800M or 2G; refused before loading when it isn't enough (default: no limit)"


def add_model(parser: argparse.ArgumentParser) -> None:
    """Which model, and what it may use."""
    group = parser.add_argument_group("model and machine")
    group.add_argument("-m", "--model", metavar="MODEL", help=MODEL_HELP)
    context = "tokens of context to have room for (default: the model's, at most 4096)"
    group.add_argument("-c", "--context", type=whole(2), metavar="N", help=context)
    add_machine(group)
    add_drafting(parser)


def add_trace(parser: argparse.ArgumentParser) -> None:
    text = (
        "write what every stage did (compute, wait, network, bubble, wasted guesses) for ui.perfetto.dev, JSON, also "
        "over several ranks"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help=text)


def add_machine(group: argparse._ActionsContainer) -> None:
    """What a model may use of the machine."""
    threads = "threads that compute (default: one per core); under mpirun also a list, one number for each rank"
    group.add_argument("-t", "--threads", type=thread_counts, metavar="N", help=threads)
    batch = "threads for runs of more than one row: prompts, guesses, batches (default: as -t)"
    group.add_argument("-tb", "--threads-batch", type=thread_counts, metavar="N", help=batch)
    numa = "spread what is loaded evenly over the memory of the machine's NUMA nodes, as all threads read all of it"
    group.add_argument("--numa", action="store_true", help=numa)
    no_mmap = (
        "read the model file instead of mapping it: always so, the option is there for other programs' command lines"
    )
    group.add_argument("--no-mmap", action="store_true", help=no_mmap)
    group.add_argument("--kv-bits", type=kv_bits, default=(16, 16), metavar="K/V", help=KV_HELP)
    group.add_argument("--requant", choices=("q4", "q8"), help=REQUANT_HELP)
    group.add_argument("--kv-disk", type=Path, metavar="DIR", help=KV_DISK_HELP)
    group.add_argument("--kv-frames", type=whole(1), metavar="N", help=KV_FRAMES_HELP)
    split = (
        "under mpirun: each rank's share of the layers, like 0.1,0.4,0.5; with a draft model 0.1,0.4,0.5/1.0, its "
        "ranks after the slash (default: evenly by weight, the last rank drafts)"
    )
    group.add_argument("--layer-split", "--mpi-layer-split", metavar="LIST", help=split)
    ship = (
        "under mpirun: ranks without the model file get their layers from those that have it, into their cache folder; "
        "interrupted, the next command goes on"
    )
    group.add_argument("--ship", action="store_true", help=ship)
    group.add_argument("--ram", type=size, metavar="SIZE", help=RAM_HELP)
    add_planned(group)
    add_device(group)
    add_more(group)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen, and when to stop."""
    add = parser.add_argument_group(
        "choosing tokens",
        "The text is a function of the model, the prompt, these options and the seed: not of threads, machine or load.",
    ).add_argument
    limit = f"at most N new tokens (default: until the model ends, or {DEFAULT_TOKENS})"
    temp = "temperature; 0 (default) or less always takes the likeliest token; 0.7 varies, and gets out of loops"
    top_p = "choose among the likeliest that together have probability P (default 1: all)"
    min_p = "leave out tokens less likely than P times the likeliest (default 0: none)"
    last_n = "how far the penalty looks back (default 64; 0 not at all, -1 over everything)"
    add("-n", "--tokens", type=whole(1), metavar="N", help=limit)
    add("--temp", type=real(-math.inf), default=0.0, metavar="T", help=temp)
    top_k = "choose among the N likeliest (default 0: all)"
    add("--top-k", type=whole(0, 2**31 - 1), default=0, metavar="N", help=top_k)
    add("--top-p", type=real(0, 1, above=True), default=1.0, metavar="P", help=top_p)
    add("--min-p", type=real(0, 1), default=0.0, metavar="P", help=min_p)
    penalty = "make tokens seen lately less likely (default 1: no)"
    add("--repeat-penalty", type=real(0, above=True), default=1.0, metavar="X", help=penalty)
    add("--repeat-last-n", type=whole(-1), default=64, metavar="N", help=last_n)
    seed = "the same seed gives the same text (default 0)"
    add("--seed", type=whole(0, 2**64 - 1), default=0, metavar="N", help=seed)
    add("--ignore-eos", action="store_true", help="go on when the model wants to end")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; may be given several times")


def sampling_of(args: argparse.Namespace) -> Sampling:
    """What ``add_sampling``'s options say."""
    same = ("top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n", "seed")
    return Sampling(args.temp, **{name: getattr(args, name) for name in same})
