"""A model over the memory limit, beside llama.cpp (mmap), Accelerate (disk offload) and AirLLM: same work, same cgroup.

    python benchmarks/versus_offload.py [--gigabytes 5] [--limit 1536] [--engines headrace llamacpp accelerate airllm]
        [--slots 1 8 32] [--batches 64] [--format BF16] [--passes 2] [--prompt-tokens 4] [--python PATH] [--out FILE]

The model is SmolLM2 inflated (inflate.py; the numbers are of that model). Every engine runs in a child of its own in a
memory cgroup (v1, page cache included) whose files are dropped from the page cache before; ``failcnt`` (how often the
limit was hit: mapped files are reclaimed, so theirs isn't 0) and the peak are recorded. Each takes ``--prompt-tokens``
tokens of 64 Spec-Bench prompts, as many of the prompts at a time as its slots or batch, and then some passes of next
tokens; a pass lasts the same whichever token it is, so tokens/s over 32 tokens is what the steady passes give
(extrapolated over tokens only). ``decode`` is that rate, prompts apart; ``prompt_rows_per_s`` is the passes of the
prompts, first passes and so the loading of what stays included. Accelerate and AirLLM read safetensors in
``--format`` from a folder made here and removed afterwards (``--keep``). Accelerate keeps in memory what its own
device map finds room for. AirLLM comes with --python, an interpreter that has it; it needs no other change than
device="cpu" and no tokenizer.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PROMPTS = 64
PYTHON_BYTES = 900 << 20
"""Of the limit, what PyTorch, transformers and a pass's own memory are left beside Accelerate's resident weights."""


def headrace(job: dict[str, Any]) -> dict[str, Any]:
    from streaming import child

    many = {"rows": PROMPTS, "runs": PROMPTS, "do": "run", "tokens": job["passes"] + 2, "kv": [16, 16]}
    many["context"] = len(job["prompts"][0]) + many["tokens"]
    said = child({**job, **many, "prompts": job["prompts"]})
    passes = said["passes"]
    decode = [p["end"] - p["start"] for p in passes if p["rows"] == [len(job["prompts"])]]
    first = next(i for i, p in enumerate(passes) if p["rows"] == [len(job["prompts"])])
    prompts = sum(p["end"] - p["start"] for p in passes[:first])
    return {
        "load_s": said["load_s"], "prompt_s": prompts, "passes_s": decode, "first": [t[0] for t in said["tokens"]],
        "streamed_gb": said["streamed"] / 1e9,
    }  # fmt: skip


def llamacpp(job: dict[str, Any]) -> dict[str, Any]:
    import xllamacpp

    start, count = time.perf_counter(), len(job["prompts"])
    p = xllamacpp.CommonParams()
    p.model.path = job["model"]
    p.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP
    p.n_parallel, p.n_ctx = count, 64 * count
    p.warmup = p.fit_params = False
    p.cache_ram_mib = p.n_ctx_checkpoints = 0
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = job["threads"]
    server = xllamacpp.Server(p)
    load, begun = time.perf_counter() - start, time.perf_counter()

    def ask(ids: list[int]) -> tuple[list[float], list[int]]:
        """When each token came."""
        stamps: list[float] = []
        tokens: list[int] = []

        def heard(chunk: Any) -> bool:
            odds = chunk["choices"][0]["logprobs"] if chunk.get("choices") else None
            if odds:
                stamps.append(time.perf_counter())
                tokens.append(odds["content"][0]["id"])
            return False

        server.handle_completions(
            {"prompt": ids, "n_predict": job["passes"] + 2, "temperature": 0, "ignore_eos": True, "cache_prompt": False,
             "stream": True, "logprobs": 1}, heard
        )  # fmt: skip
        return stamps, tokens

    with ThreadPoolExecutor(count) as pool:
        heard = list(pool.map(ask, job["prompts"]))
    # From the pass that gave the last slot its first token to the one that gave a slot its last: all slots decode.
    t0 = max(stamps[0] for stamps, _ in heard)
    t1 = min(stamps[-1] for stamps, _ in heard)
    made = sum(t0 < t <= t1 for stamps, _ in heard for t in stamps)
    if t1 <= t0:
        return {"failed": "the slots never decoded all at once; more --passes"}
    passes = max(1, round(made / count))
    each = (t1 - t0) / passes
    return {"load_s": load, "prompt_s": t0 - begun, "passes_s": [each] * passes, "first": [t[0] for _, t in heard]}


def accelerate(job: dict[str, Any]) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    start = time.perf_counter()
    torch.set_num_threads(job["threads"])
    kind = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[job["format"]]
    room = max(64 << 20, job["limit"] - PYTHON_BYTES)
    model = AutoModelForCausalLM.from_pretrained(
        job["folder"], dtype=kind, device_map="auto", max_memory={"cpu": room}, offload_folder=job["offload"]
    )
    return _forwards(model, job, time.perf_counter() - start)


def airllm(job: dict[str, Any]) -> dict[str, Any]:
    import torch
    from airllm.airllm_base import AirLLMBaseModel

    start = time.perf_counter()
    torch.set_num_threads(job["threads"])

    class Ours(AirLLMBaseModel):  # type: ignore[misc]
        def get_tokenizer(self, hf_token: str | None = None) -> None:
            return None

    model = Ours(job["folder"], device="cpu", layer_shards_saving_path=job["offload"])
    if job["do"] == "prepare":  # it splits the files first, which is no part of the work
        return {}
    return _forwards(model, job, time.perf_counter() - start)


def _forwards(model: Any, job: dict[str, Any], load: float) -> dict[str, Any]:
    """The prompts' pass, then passes of next tokens, through transformers' own cache."""
    import torch

    times, first, past, ids = [], None, None, torch.tensor(job["prompts"])
    with torch.inference_mode():
        for _ in range(job["passes"] + 1):
            start = time.perf_counter()
            out = model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)
            past, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
            first = ids[:, 0].tolist() if first is None else first
            times.append(time.perf_counter() - start)
            print(f"pass {times[-1]:.1f} s", file=sys.stderr, flush=True)
    return {"load_s": load, "prompt_s": times[0], "passes_s": times[1:], "first": first}


ENGINES = {"headrace": headrace, "llamacpp": llamacpp, "accelerate": accelerate, "airllm": airllm}


def rated(said: dict[str, Any], batch: int, prompt: int) -> dict[str, Any]:
    """A child's answer as figures."""
    out = {"batch": batch, **{k: said[k] for k in ("failed", "failcnt") if k in said}}
    if "max_usage" in said:
        out["peak_mib"] = said["max_usage"] >> 20
    if "failed" not in said:
        steady = said["passes_s"][1:] or said["passes_s"]
        out |= {k: round(said[k], 2) for k in ("load_s", "prompt_s", "streamed_gb") if k in said}
        out |= {"passes_s": [round(t, 2) for t in said["passes_s"]], "pass_s": round(sum(steady) / len(steady), 3)}
        out |= {"decode": batch * len(steady) / sum(steady), "prompt_rows_per_s": batch * prompt / said["prompt_s"]}
        out["first"] = said["first"]
    return out


def versus(args: argparse.Namespace, model: Path, folder: Path) -> dict[str, list[dict[str, Any]]]:
    from cgroup import drop, launch, need
    from hf_writer import write_folder
    from streaming import prompts

    limit = args.limit << 20
    asked = [ids for ids in prompts(4 * PROMPTS, args.prompt_tokens) if len(ids) == args.prompt_tokens][:PROMPTS]
    packs, hf, offload = model.parent / "packs", folder / "model", folder / "offload"
    job = {"threads": args.threads, "passes": args.passes, "model": str(model), "packs": str(packs), "limit": limit}
    job |= {"format": args.format, "folder": str(hf), "offload": str(offload), "ram": (args.limit - args.spare) << 20}
    if {"accelerate", "airllm"} & set(args.engines) and not (hf / "config.json").exists():
        write_folder(model, hf, args.format)
    sizes = {"headrace": [PROMPTS], "llamacpp": args.slots, "accelerate": args.batches, "airllm": args.batches[-1:]}
    results: dict[str, list[dict[str, Any]]] = {}
    for engine in args.engines:
        python = args.python if engine == "airllm" else sys.executable
        for batch in sizes[engine]:
            one = {**job, "engine": engine, "do": "run", "prompts": asked[:batch]}
            if engine == "headrace":  # packs the file
                need(launch(__file__, {**one, "prompts": asked[:1], "passes": 1}, None))
            shutil.rmtree(offload, ignore_errors=True)
            offload.mkdir(parents=True, exist_ok=True)
            if engine == "airllm":
                said = launch(__file__, {**one, "do": "prepare"}, None, python)
                if "failed" in said:
                    results.setdefault(engine, []).append(said)
                    continue
            drop([model, packs, folder])
            said = launch(__file__, one, limit, python, args.seconds)
            found = rated(said, batch, args.prompt_tokens)
            results.setdefault(engine, []).append(found)
            print(engine, {k: v for k, v in found.items() if k != "first"}, file=sys.stderr, flush=True)
    return results


def main() -> None:
    if sys.argv[1:] == ["--child"]:
        job = json.loads(sys.stdin.read())
        print(json.dumps(ENGINES[job["engine"]](job)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--limit", type=int, default=1536, help="MiB")
    parser.add_argument("--spare", type=int, default=128, help="MiB of it that --ram doesn't get")
    parser.add_argument("--engines", nargs="+", default=["headrace", "llamacpp", "accelerate"], choices=list(ENGINES))
    parser.add_argument("--slots", nargs="+", type=int, default=[1, 8, 32], help="of llama.cpp")
    parser.add_argument("--batches", nargs="+", type=int, default=[64], help="of Accelerate; AirLLM has the last")
    parser.add_argument("--format", default="BF16", choices=("BF16", "F32"))
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1200, help="after which a child is given up")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has airllm")
    parser.add_argument("--folder", type=Path, help="of the safetensors (default: beside the model)")
    parser.add_argument("--keep", action="store_true", help="leave the safetensors")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from streaming import inflated

    model = inflated(args.gigabytes, None)
    folder = args.folder or model.parent / f"{model.stem}-{args.format.lower()}"
    try:
        results = versus(args, model, folder)
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    best = {engine: max((r.get("decode", 0.0) for r in rows), default=0.0) for engine, rows in results.items()}
    ours = results.get("headrace", [{}])[0].get("first")
    for rows in results.values():
        for row in rows:
            theirs = row.pop("first", None)
            if ours and theirs:  # greedy: what differs is rounding, or a mistake of this file
                row["same_first_token"] = sum(a == b for a, b in zip(ours, theirs, strict=False)) / len(theirs)
    answer = {
        "benchmark": "versus_offload", "model": f"SmolLM2-135M inflated to {model.stat().st_size / 1e9:.2f} GB",
        "limit_mib": args.limit, "theirs": args.format, "decode_tokens_per_s": best,
        "ratio": {e: best["headrace"] / rate for e, rate in best.items() if rate and "headrace" in best}, **results,
    }  # fmt: skip
    text = json.dumps(answer, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
