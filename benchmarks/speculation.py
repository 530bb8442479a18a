"""Speculation on one machine: does it pay, and what does it cost when it can't?

    python benchmarks/speculation.py [--model smollm2-q4_1] [--prompts 5] [--tokens 256] [--rounds 5] [--out FILE]

``lookup``: the summary and retrieval prompts of spec_bench_dev.jsonl with the n-gram drafter, against none, taking
turns; llama.cpp's own (``ngram-simple``) and its plain decoding in the same rounds. ``useless``: a random draft model
on the same cores, against none, one text from the first token on, in an engine that has learned nothing yet.
Decode time is from the first token to the last, by the wall clock; "cpu" is the process's CPU time of the same span,
for machines that aren't quiet. Ratios are of medians over the rounds; every sample is in the JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from model_zoo import model_path, random_draft, tell
from vs_llamacpp import Worker

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "spec_bench_dev.jsonl"
LONGEST = 1500
"""Prompt tokens; longer prompts are left out."""


def serve_headrace(path: str, threads: int, drafter: str) -> None:
    """Answers {"text", "tokens"}, or {"fresh": true} to begin with a new engine."""
    from headrace.engine import load
    from headrace.text.template import ChatTemplate

    def fresh() -> Any:
        return load(path, threads=threads, context=2048, drafter=() if drafter == "none" else drafter)

    engine = fresh()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        if job.get("fresh"):
            engine.close()
            engine = fresh()
        ids = ChatTemplate(engine.tokenizer).encode([{"role": "user", "content": job["text"]}])
        if len(ids) > LONGEST:
            print(json.dumps({"skipped": len(ids)}), flush=True)
            continue
        before, cpu, answer = vars(engine.head.counts).copy(), 0.0, []
        request = engine.submit(ids, job["tokens"], ignore_eos=job.get("ignore_eos", False))
        while not request.finish:
            engine.work()
            cpu = cpu or time.process_time()
        answer, f = list(request.tokens), request.figures
        counts = {k: v - before[k] for k, v in vars(engine.head.counts).items()}
        said = {"seconds": f.last - f.first, "cpu": time.process_time() - cpu, "ids": answer, **counts}
        print(json.dumps(said), flush=True)


def serve_llamacpp(path: str, threads: int, drafter: str) -> None:
    import xllamacpp

    p = xllamacpp.CommonParams()
    p.model.path, p.n_ctx, p.n_parallel = path, 2048, 1
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = threads
    if drafter != "none":
        p.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    server = xllamacpp.Server(p)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        asked = {"messages": [{"role": "user", "content": job["text"]}], "max_tokens": job["tokens"], "temperature": 0}
        said = server.handle_chat_completions({**asked, "cache_prompt": False})
        t = said["timings"]
        keep = {k: v for k, v in t.items() if k.startswith("draft")}
        print(json.dumps({"seconds": t["predicted_ms"] / 1000, "count": t["predicted_n"], **keep}), flush=True)


def prompts(categories: tuple[str, ...], count: int) -> list[str]:
    """The first turns of so many questions of each category, the short ones first."""
    rows = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
    found = []
    for category in categories:
        texts = sorted((r["turns"][0] for r in rows if r["category"] == category), key=len)
        found += texts[:: max(1, len(texts) * 2 // 3 // count)][:count]
    return found


def lookup(path: Path, threads: int, count: int, tokens: int, rounds: int, both: bool) -> dict[str, Any]:
    """Tokens/s of each side over all prompts, by round."""
    sides = [(side, drafter) for side in ("headrace", "llamacpp")[: 1 + both] for drafter in ("none", "ngram")]
    names = {side: "-".join(side) for side in sides}
    workers = {names[s]: Worker(f"{s[0]}:{s[1]}", path, threads, Path(__file__)) for s in sides}
    samples: dict[str, list[float]] = {name: [] for name in workers}
    cpu: dict[str, list[float]] = {name: [] for name in workers if name.startswith("headrace")}
    guesses: dict[str, dict[str, int]] = {}
    texts = prompts(("summarization", "rag"), count)
    try:
        for round_ in range(rounds):
            spent = dict.fromkeys(workers, (0, 0.0, 0.0))
            for text in texts:
                said = {}
                for name in list(workers)[:: 1 if round_ % 2 else -1]:
                    said[name] = workers[name].ask(text=text, tokens=tokens)
                if any("skipped" in s for s in said.values()):
                    continue
                assert said["headrace-none"]["ids"] == said["headrace-ngram"]["ids"], "the text differs"
                for name, s in said.items():
                    made = s["count"] if "count" in s else len(s["ids"])
                    old = spent[name]
                    spent[name] = old[0] + made - 1, old[1] + s["seconds"], old[2] + s.get("cpu", 0.0)
                    for key in ("launched", "accepted", "runs", "draft_n", "draft_n_accepted"):
                        if key in s:
                            sums = guesses.setdefault(name, {})
                            sums[key] = sums.get(key, 0) + s[key]
            for name, (made, seconds, used) in spent.items():
                samples[name].append(made / seconds)
                if name in cpu:
                    cpu[name].append(made / used)
            print({name: round(v[-1], 1) for name, v in samples.items()}, file=sys.stderr, flush=True)
    finally:
        for worker in workers.values():
            worker.close()
    middle = {name: round(statistics.median(v), 2) for name, v in samples.items()}
    by_cpu = {name: round(statistics.median(v), 2) for name, v in cpu.items()}
    return {
        "prompts": len(texts), "tokens": tokens, "medians": middle, "medians_by_cpu": by_cpu, "guesses": guesses,
        "gain": round(middle["headrace-ngram"] / middle["headrace-none"], 3),
        "gain_by_cpu": round(by_cpu["headrace-ngram"] / by_cpu["headrace-none"], 3),
        "gain_llamacpp": round(middle["llamacpp-ngram"] / middle["llamacpp-none"], 3) if both else None,
        "samples": {k: [round(x, 2) for x in v] for k, v in samples.items()},
    }  # fmt: skip


def useless(path: Path, threads: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Time of one text with a drafter that is never right against without, engines fresh each time."""
    draft = random_draft()
    sides = {"none": "none", "useless": str(draft)}
    workers = {name: Worker(f"headrace:{drafter}", path, threads, Path(__file__)) for name, drafter in sides.items()}
    samples: dict[str, list[float]] = {name: [] for name in workers}
    cpu: dict[str, list[float]] = {name: [] for name in workers}
    last: dict[str, Any] = {}
    try:
        for round_ in range(rounds + 1):
            said = {}
            for name in list(workers)[:: 1 if round_ % 2 else -1]:
                job = {"text": "Write a story about a lighthouse.", "tokens": tokens, "ignore_eos": True}
                said[name] = workers[name].ask(**job, fresh=True)
                if round_:
                    samples[name].append(said[name]["seconds"])
                    cpu[name].append(said[name]["cpu"])
            assert said["none"]["ids"] == said["useless"]["ids"], "the text differs"
            last = {k: v for k, v in said["useless"].items() if k != "ids"}
            print({k: round(v[-1], 3) for k, v in samples.items() if v}, file=sys.stderr, flush=True)
    finally:
        for worker in workers.values():
            worker.close()
    middle = {name: statistics.median(v) for name, v in samples.items()}
    by_cpu = {name: statistics.median(v) for name, v in cpu.items()}
    pairs = [a / b for a, b in zip(samples["useless"], samples["none"], strict=True)]
    return {
        "tokens": tokens, "slower": round(middle["useless"] / middle["none"] - 1, 4),
        "slower_by_cpu": round(by_cpu["useless"] / by_cpu["none"] - 1, 4),
        "slower_median_of_pairs": round(statistics.median(pairs) - 1, 4), "last": last,
        "samples": {k: [round(x, 3) for x in v] for k, v in samples.items()},
    }  # fmt: skip


def main() -> None:
    if len(sys.argv) == 5 and sys.argv[1] == "--serve":
        side, _, drafter = sys.argv[2].partition(":")
        serve = {"headrace": serve_headrace, "llamacpp": serve_llamacpp}[side]
        serve(sys.argv[3], int(sys.argv[4]), drafter)
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-q4_1")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=5, help="of each of the two kinds")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", action="store_true", help="without llama.cpp")
    parser.add_argument("--only", choices=("lookup", "useless"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    path = model_path(args.model)
    result: dict[str, Any] = {"benchmark": "speculation", "model": args.model, "threads": args.threads}
    if args.only != "lookup":
        result["useless"] = useless(path, args.threads, args.tokens, args.rounds)
    if args.only != "useless":
        result["lookup"] = lookup(path, args.threads, args.prompts, args.tokens, args.rounds, not args.alone)
    tell(result, args.out)


if __name__ == "__main__":
    main()
