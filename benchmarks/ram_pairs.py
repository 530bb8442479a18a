"""Twenty (model, --ram) pairs: each a fresh process that keeps its peak within the budget, or refuses with numbers.

    python benchmarks/ram_pairs.py

The peak is the system's own (``ru_maxrss`` of the process when it is over). Every second pair is a batch of 24 rows,
whose logits and caches take more than one answer's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from model_zoo import model_path
from planner import path_of

PAIRS: tuple[tuple[str, int], ...] = (
    ("smollm2-q4_1", 90), ("smollm2-q4_1", 140), ("smollm2-q4_1", 180), ("smollm2-q4_1", 200), ("smollm2-q4_1", 260),
    ("smollm2-q4_1", 400), ("smollm2-q8_0", 150), ("smollm2-q8_0", 200), ("smollm2-q8_0", 240), ("smollm2-q8_0", 330),
    ("gemma", 250), ("gemma", 320), ("gemma", 350), ("gemma", 400), ("gemma", 520), ("gemma", 700), ("inflated", 260),
    ("inflated", 300), ("inflated", 400), ("inflated", 800),
)  # fmt: skip
TEXT = "A long time ago, in a town by the sea, there lived a woman who repaired clocks. " * 6


def command(model: Path, mib: int, batch: bool, folder: Path) -> list[str]:
    common = ["-m", str(model), "--ram", f"{mib}M", "-t", "2", "-c", "512"]
    if not batch:
        return ["run", *common, "--raw", "-n", "8", "--ignore-eos", TEXT]
    rows = folder / "in.jsonl"
    body = {"prompt": TEXT, "max_tokens": 4, "ignore_eos": True}
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i in range(24)]
    rows.write_text("\n".join(map(json.dumps, lines)))
    return ["batch", str(rows), "-o", str(folder / "out.jsonl"), *common]


def one(name: str, mib: int, batch: bool) -> dict[str, Any]:
    model = path_of(name) if name in ("gemma", "inflated") else model_path(name)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as said:
        argv = [sys.executable, "-m", "headrace", *command(model, mib, batch, Path(folder))]
        child = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=said)
        _, status, usage = os.wait4(child.pid, 0)
        said.seek(0)
        line = said.read().strip().splitlines()[-1:]
    refused = os.waitstatus_to_exitcode(status) == 2
    peak = usage.ru_maxrss / 1024
    good = refused and "MiB" in line[0] if refused else os.waitstatus_to_exitcode(status) == 0 and peak <= mib
    return {"model": name, "ram_mib": mib, "batch": batch, "peak_mib": round(peak, 1), "refused": refused,
            "good": good, "said": line[0] if line else ""}  # fmt: skip


def main() -> None:
    found = []
    for i, (name, mib) in enumerate(PAIRS):
        found.append(one(name, mib, i % 2 == 1))
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"good": sum(f["good"] for f in found), "of": len(found), "pairs": found}, indent=1))


if __name__ == "__main__":
    main()
