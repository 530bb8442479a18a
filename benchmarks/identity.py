"""Speculation changes no text: real MPI ranks against one process, SmolLM2, token by token.

    python benchmarks/identity.py [--ranks 1,2,3,4,5,6] [--prompts 50] [--tokens 24] [--hosts] [--out FILE]

Every rank count meets every drafter (n-gram, the model's first layers, a draft model: its own weights in Q4_0), narrow
and wide trees, temperatures 0 and 0.8: 12 settings a rank count. The prompts are dealt out over its six drafters and
trees, and each is answered at both temperatures, so each rank count answers all prompts twice. One MPI job a rank
count, drafter and tree. Beside the text, the run's summary and its trace must show guesses launched, accepted and
cancelled, all above 0; a setting whose prompts leave one at 0 gets others, up to three times, then PipeInfer's policy.
In one process guesses travel in the known token's pass and what is wrong comes back with it, so nothing is under way to
be cancelled: there the n-gram's are synchronous and wrong ones take the place of cancelled ones; the models' are
PipeInfer's, which get ahead while a prompt is read in runs of eight rows.
``--hosts``: the ranks are on three network namespaces with addresses, host names and sshd of their own (needs root).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model_zoo import model_path, tell

ROOT = Path(__file__).resolve().parent.parent
TEMPERATURES = ({}, {"temperature": 0.8, "seed": 11})
TREES = {"narrow": 1, "wide": 4}
LAYERS = 24
"""Of the model's 30 blocks, in the draft made of them."""
ROUNDS = 4
"""Shares of the prompts that a setting may get, one after the other."""
PIPEINFER = {"draft": 3, "pa": 0.001, "ps": 0.02}


def prompts(model: Path, count: int, longest: int = 128) -> list[list[int]]:
    """Spec-Bench's prompts of all categories as ids, cut; where they are missing, pieces of the licence."""
    from headrace.formats.index import open_model
    from headrace.text.tokenizer import Tokenizer

    data = ROOT.parent / "shared" / "data" / "spec_bench_dev.jsonl"
    if data.exists():
        texts = [json.loads(line)["turns"][0] for line in data.read_text(encoding="utf-8").splitlines()]
        texts = texts[:: max(1, len(texts) // count)]
    else:
        licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
        texts = [licence[i * 151 % 8000 :][:600] for i in range(count)]
    with open_model(model) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    return [tokenizer.encode(text)[:longest] for text in texts[:count]]


def answers(engine: Any, texts: list[list[int]], tokens: int, sampling: dict[str, Any]) -> list[list[int]]:
    from headrace.run.types import Sampling

    done = engine.generate(texts, max_tokens=tokens, sampling=Sampling(**sampling), ignore_eos=True)
    return [list(each.tokens) for each in done]


def alone(model: Path, texts: list[list[int]], tokens: int) -> list[list[list[int]]]:
    """One process without guesses: for each temperature the tokens of each prompt."""
    from headrace.engine import load

    with load(model, threads=2, context=512, caches=8) as engine:
        return [answers(engine, texts, tokens, sampling) for sampling in TEMPERATURES]


# --- one rank ---------------------------------------------------------------------------------------------


def rank(job: Path) -> int:
    """What mpirun starts: the job of the file, answered by rank 0 as one line of JSON for each temperature."""
    from headrace.cluster.mpi import join
    from headrace.engine import Options, load
    from headrace.ensemble import serve

    asked = json.loads(job.read_text())
    model = Path(asked["model"])
    options = Options(threads=1, rank_threads=(1,), context=512, **asked["options"])
    with join() as link:
        if link.rank:
            return serve(lambda: model, options, link, True)
        with load(model, options, link=link) as engine:
            for sampling in TEMPERATURES:
                engine.watch(trace=True)
                before, found, counts = vars(engine.head.counts).copy(), [], dict[str, int]()
                for share in asked["shares"]:
                    found.append(answers(engine, share, asked["tokens"], sampling))
                    counts = {k: v - before[k] for k, v in vars(engine.head.counts).items()}
                    if all_three(counts, link.size == 1):
                        break
                said = {"tokens": found, "hosts": sorted(set(link.hosts)), **counts}
                said |= {"wrong": engine.head.check_integrity(), "trace": traced(engine)}
                print(json.dumps(said), flush=True)
    return 0


def all_three(counts: dict[str, int], alone: bool) -> bool:
    """Whether guesses were launched, accepted, and cancelled (in one process: wrong)."""
    wrong = counts["launched"] - counts["accepted"] if alone else counts["cancelled"]
    return min(counts["launched"], counts["accepted"], wrong) > 0


def traced(engine: Any) -> dict[str, int]:
    """The same counts as a trace shows them: guesses in launched runs, those that came true, rows lost on stages."""
    engine.totals()
    seen = engine.parts.loop.seen
    targets = engine.parts.loop.targets
    lost = sum(v.rows - v.alive for v in seen.visits if v.stage < targets)
    fates = seen.fates.values()
    return {"guesses": sum(f.guesses for f in fates), "right": sum(f.right for f in fates), "lost": lost}


# --- all of them ------------------------------------------------------------------------------------------


def mpirun(ranks: int, job: Path, hosts: Any = None) -> list[dict[str, Any]]:
    """The job on so many ranks; a line of its answer for each temperature."""
    program = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or "mpirun"
    paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    variables = {**os.environ, **root, "PYTHONPATH": os.pathsep.join(paths)}
    words = [program, "-n", str(ranks), "--bind-to", "none"]
    if hosts is None:
        words += ["--oversubscribe"]
    else:
        each = ",".join(f"{name}:{-(-ranks // len(hosts.names))}" for name in hosts.names)
        words += ["--host", each, "--map-by", "node", "--prtemca", "plm_ssh_agent", hosts.ssh]
        words += ["--mca", "btl", "tcp,self", "-x", "PYTHONPATH"]
        words = [*hosts.inside("user"), *words]
    words += [sys.executable, __file__, "--rank", str(job)]
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise SystemExit(f"{ranks} ranks failed ({done.returncode}): {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def options_of(ranks: int, drafter: str, tree: str, draft: Path, policy: str) -> dict[str, Any]:
    named = {"ngram": "ngram", "layers": f"layers:{LAYERS}", "model": str(draft)}[drafter]
    knobs: dict[str, float] = {"np": TREES[tree]}
    if policy == "pipeinfer":
        knobs |= PIPEINFER
    elif policy == "sync":
        knobs = {"draft": 4 * TREES[tree]}
    shape = {"sequences": 1, "rows": 8 if ranks == 1 else 64}
    return {"drafter": named, "policy": policy, "knobs": knobs, **shape}


def policies(ranks: int, drafter: str) -> tuple[str, ...]:
    """In the order tried, until everything that can happen to a guess has happened."""
    if drafter == "ngram":
        return ("sync",) if ranks == 1 else ("ours",)
    return ("pipeinfer",) if ranks == 1 else ("ours", "pipeinfer")


def cell(
    ranks: int, drafter: str, tree: str, models: tuple[Path, Path], asked: dict[str, Any], folder: Path,
    plain: list[list[list[list[int]]]], hosts: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """A rank count, drafter and tree; one result for each temperature. plain: by temperature, share and prompt."""
    results: list[dict[str, Any]] = []
    for policy in policies(ranks, drafter):
        job = folder / "job.json"
        options = options_of(ranks, drafter, tree, models[1], policy)
        job.write_text(json.dumps({**asked, "model": str(models[0]), "options": options}))
        begin, results = time.monotonic(), []
        for sampling, line, right in zip(TEMPERATURES, mpirun(ranks, job, hosts), plain, strict=True):
            found = line["tokens"]
            results.append({
                "ranks": ranks, "drafter": drafter, "tree": tree, "temperature": sampling.get("temperature", 0),
                "policy": policy, "prompts": sum(map(len, found)), "identical": found == right[: len(found)],
                "all_three": all_three(line, ranks == 1) and line["trace"]["right"] > 0,
                **{k: line[k] for k in ("launched", "accepted", "cancelled", "runs", "trace", "wrong", "hosts")},
                "seconds": round(time.monotonic() - begin, 1),
            })  # fmt: skip
        if all(r["all_three"] for r in results):
            break
    return results


def measure(
    models: tuple[Path, Path], counts: Sequence[int], some: int, tokens: int, drafters: Sequence[str], hosts: Any = None
) -> dict[str, Any]:
    """models: target and draft. hosts: a ``helpers_hosts.Hosts`` of three, or None for this machine."""
    texts = prompts(models[0], some)
    plain = alone(models[0], texts, tokens)
    kinds = [(drafter, tree) for drafter in drafters for tree in TREES]
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for ranks in counts:
            for i, (drafter, tree) in enumerate(kinds):
                shares = [range((i + ranks + j) % len(kinds), len(texts), len(kinds)) for j in range(ROUNDS)]
                asked = {"shares": [[texts[k] for k in share] for share in shares], "tokens": tokens}
                right = [[[each[k] for k in share] for share in shares] for each in plain]
                results = cell(ranks, drafter, tree, models, asked, Path(name), right, hosts)
                for result in results:
                    print(json.dumps(result), file=sys.stderr, flush=True)
                found += results
    return {
        "benchmark": "identity", "prompts": len(texts), "tokens": tokens, "settings": len(found),
        "identical": sum(r["identical"] for r in found), "all_three": sum(r["all_three"] for r in found),
        "wrong": sum(len(r["wrong"]) for r in found), "results": found,
    }  # fmt: skip


def main() -> int:
    if len(sys.argv) == 3 and sys.argv[1] == "--rank":
        return rank(Path(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,3,4,5,6", type=lambda s: [int(n) for n in s.split(",")])
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--drafters", default="ngram,layers,model", type=lambda s: tuple(s.split(",")))
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    models = model_path("smollm2-q4_1"), model_path("smollm2-q4_0")
    asked = models, args.ranks, args.prompts, args.tokens, args.drafters
    if args.hosts:
        sys.path.insert(0, str(ROOT / "tests"))
        from helpers_hosts import Hosts

        with Hosts(3) as hosts:
            result = measure(*asked, hosts)
    else:
        result = measure(*asked)
    tell(result, args.out)
    return 0 if result["identical"] == result["all_three"] == result["settings"] and not result["wrong"] else 1


if __name__ == "__main__":
    sys.exit(main())
