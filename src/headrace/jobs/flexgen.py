"""FlexGen's benchmark: so many prompts of one length, so many tokens each, its block and its six percentages.

Its command line is ``cli/flexgen.py``. Sources: Sheng et al. (ICML 2023, arXiv 2303.06865), the public ``flex_opt.py``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headrace import system
from headrace.engine import Engine
from headrace.errors import BadRequest, Unavailable
from headrace.formats.index import open_model
from headrace.kernels.dispatch import TORCH
from headrace.memory.kv_disk import least_frames
from headrace.memory.slots import pages_for
from headrace.model.layers import spec_of
from headrace.model.spec import Spec
from headrace.options import Options
from headrace.plan.flexgen import Percent, comes_out, placed
from headrace.plan.plan import PLAIN
from headrace.plan.sizes import ModelCost
from headrace.results import Completion

SENTENCE = "The capital of France is a city where people"
PREFILL = 256
"""Most rows of a run of prompts, unless the gpu batch is larger."""


@dataclass(frozen=True)
class Policy:
    """rows x runs sequences at a time (its gpu batch size and number of gpu batches), and its percentages."""

    rows: int
    runs: int
    percent: Percent
    prompt_len: int
    gen_len: int

    @property
    def sequences(self) -> int:
        return self.rows * self.runs


def carried_out(path: Path, policy: Policy, folder: Path, options: Options) -> tuple[Options, str]:
    """(the options that do it on ``options.device``, what the percentages came out as). folder: for what lies on disk.

    On the CPU there is no device: its memory is the nearest tier, so the device's shares are the host's there.
    """
    with open_model(path) as file:
        spec = spec_of(file)
    context = policy.prompt_len + policy.gen_len
    if context > spec.context:
        raise BadRequest(
            f"{policy.prompt_len} + {policy.gen_len} tokens are asked for and this model takes {spec.context}; give a "
            "smaller --prompt-len or --gen-len."
        )
    own_memory = options.device in TORCH
    cost = ModelCost.from_spec(spec.family, spec, lambda _, n, k: 2 * n * k)
    real = placed(cost, policy.percent, ("device" if own_memory else "host", "host", "disk"))
    rows = max(policy.rows, min(PREFILL, policy.rows * policy.prompt_len))
    on_disk = any(p.kv == "disk" for p in real.places)
    if on_disk or real.activations == "disk":
        make_folder(folder)
    options = replace(
        options, places=real.places, context=context, rows=rows, nexts=policy.rows, runs=policy.runs,
        sequences=policy.sequences, caches=policy.sequences, activations=real.activations,
        kv_disk=folder if on_disk else None,
    )  # fmt: skip
    if own_memory:
        return options, comes_out(policy.percent, real.percent)
    places = tuple(p if spec.block(key) else PLAIN for key, p in zip(spec.keys, real.places, strict=True))
    wg, wc, cg, cc, hg, hc = real.percent
    options, share = _frames(replace(options, places=places), spec, cg + cc)
    shares = (0.0, wg + wc, 0.0, share, 0.0, hg + hc)
    return options, comes_out(policy.percent, shares) + " There is no device here: its shares are the host's."


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unavailable(f"{folder}: can't be made ({error.strerror}); choose another --offload-dir.") from None


def _frames(options: Options, spec: Spec, share: float) -> tuple[Options, float]:
    """Frames for this percentage of the cache on the CPU, at least what the loop needs; and the share they are."""
    if options.kv_disk is None:
        return options, 100.0
    layers, each = len(spec.blocks), pages_for(options.context or 0)
    pages = each * options.sequences
    least = least_frames(layers, pages, min(options.rows, options.sequences) * each, options.sequences)
    frames = max(least, round(share / 100 * layers * pages))
    return replace(options, kv_frames=frames), 100 * frames / (layers * pages)


# --- the work ---------------------------------------------------------------------------------------------


def prompts(engine: Engine, policy: Policy) -> list[list[int]]:
    """One for each sequence, of the length asked: a sentence said again and again, begun at another word each time."""
    ids = engine.tokenizer.encode(SENTENCE)
    first = 1 if engine.tokenizer.add_bos and len(ids) > 1 else 0
    body = ids[first:]
    again = policy.prompt_len // len(body) + 2
    begun = ((body * again)[i % len(body) :] for i in range(policy.sequences))
    return [[*ids[:first], *words][: policy.prompt_len] for words in begun]


@dataclass(frozen=True)
class Outcome:
    """What it took, in seconds. prefill: until every sequence had its first token; early: tokens made until then."""

    policy: Policy
    generated: int
    prefill: float
    total: float
    early: int
    completions: Sequence[Completion]

    @property
    def projected(self) -> bool:
        return self.generated < self.policy.gen_len

    @property
    def decode(self) -> float:
        """Seconds after the prefill; of all tokens asked for, when only some were generated."""
        measured = self.total - self.prefill
        return measured * (self.policy.gen_len - 1) / (self.generated - 1) if self.projected else measured


def measure(engine: Engine, policy: Policy, generated: int) -> Outcome:
    """Generate ``generated`` tokens after each prompt. BadRequest when the model computes what is no number."""
    start = time.perf_counter()
    jobs = [engine.submit(prompt, generated, ignore_eos=True) for prompt in prompts(engine, policy)]
    prefill, early = 0.0, 0
    try:
        while not all(job.finish for job in jobs):
            engine.work()
            if not prefill and all(job.tokens or job.finish for job in jobs):
                prefill, early = time.perf_counter() - start, sum(len(job.tokens) for job in jobs)
    finally:
        for job in jobs:
            engine.cancel(job.request.id)
    if any(job.finish == "error" for job in jobs):
        raise BadRequest("The model's output stopped being finite numbers; its file is damaged.")
    total = time.perf_counter() - start
    return Outcome(policy, generated, prefill, total, early, [job.completion() for job in jobs])


def report(engine: Engine, done: Outcome) -> Iterator[str]:
    """The lines FlexGen writes to its log, with our figures, and what was moved."""
    gb, parts, p = 1 << 30, engine.parts, done.policy
    spec, (k, v) = parts.model.spec, parts.kv_bits
    cache = sum(spec.kv_bytes(key, k, v) for key in spec.keys) * (p.prompt_len + p.gen_len) * p.sequences
    weights = sum(layer.nbytes for layer in parts.model.layers)
    hidden = 4 * spec.width * parts.loop.head.order.rows * p.runs
    yield f"model size: {weights / gb:.3f} GB\tcache size: {cache / gb:.3f} GB\thidden size (p): {hidden / gb:.3f} GB"
    peak = system.peak_rss()
    yield f"peak host mem: {(peak or 0) / gb:.3f} GB\tprojected: {done.projected}"
    total = done.prefill + done.decode
    decoded = p.sequences * p.gen_len - done.early if not done.projected else p.sequences * (p.gen_len - 1)
    rows = (
        ("prefill", done.prefill, p.sequences * p.prompt_len),
        ("decode", done.decode, decoded),
        ("total", total, p.sequences * p.gen_len),
    )
    for name, seconds, tokens in rows:
        rate = tokens / seconds if seconds > 0 else 0.0
        yield f"{name} latency: {seconds:.3f} s\t{name} throughput: {rate:.3f} token/s"
    moved = parts.computer.traffic()
    if moved.streams:
        spilled = 0 if parts.spill is None else parts.spill.read_bytes
        yield (
            f"read from disk: {(moved.read + spilled) / gb:.3f} GB\tover the link: {moved.crossed / gb:.3f} GB\t"
            f"waited for either: {100 * moved.waited / done.total:.0f}% of the time"
        )
