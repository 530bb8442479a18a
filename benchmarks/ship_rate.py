"""How fast ``--ship`` brings layers over a limited link, as JSON: two hosts of their own on this machine (network
namespaces, ``tc tbf``), a model file on the first. Needs root.

    python benchmarks/ship_rate.py MODEL.gguf [--rate 1gbit] [--repeat 3]

The rate aimed at is 80% of the link's; ``share`` is what was reached, of the payload that TCP leaves of the rate
(1448 of 1514 bytes of an Ethernet frame).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from helpers_hosts import Hosts
from helpers_mpi import MPIRUN, environment

UNITS = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}
FRAME = 1448 / 1514


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rate", default="1gbit", help="as tc writes it")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    number, unit = re.fullmatch(r"([\d.]+)([gmk]bit)", args.rate).groups()
    limit = float(number) * UNITS[unit] / 8
    found = []
    with Hosts(2, rate=args.rate) as hosts:
        for _ in range(args.repeat):
            found.append(once(hosts, args.model))
    best, worst = max(f["bytes_per_s"] for f in found), min(f["bytes_per_s"] for f in found)
    says = {"best": best / limit, "worst": worst / limit, "best_of_payload": best / limit / FRAME}
    print(json.dumps({"rate": args.rate, "limit_bytes_per_s": limit, "runs": found, "share": says}, indent=1))
    return 0


def once(hosts: Hosts, model: Path) -> dict[str, float]:
    words = [sys.executable, "-m", "headrace", "run", "--ship", "--raw", "-t", "1", "-n", "2", "-c", "64"]
    words += ["--layer-split", "0,1", "hello", "-m"]
    start = [MPIRUN, "--prtemca", "plm_ssh_agent", hosts.ssh, "--prtemca", "plm_ssh_no_tree_spawn", "1"]
    start += ["--mca", "btl", "tcp,self", "--bind-to", "none"]
    start += ["--mca", "pml", "ob1", "-x", "PYTHONPATH", "-x", "HEADRACE_CACHE"]
    with tempfile.TemporaryDirectory() as cache:
        env = {**environment(), "HEADRACE_CACHE": cache}
        lacking = ["-n", "1", "--host", "b", *words, "/nowhere/m.gguf"]
        line = [*start, "-n", "1", "--host", "a", *words, model, ":", *lacking]
        pipe = subprocess.PIPE
        job = hosts.popen(line, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
        out, err = job.communicate(timeout=600)
        assert job.returncode == 0, (out + err).decode()
    size, took = re.search(r"Received ([\d.,]+) MB of \d+ layers in ([\d.]+) s", err.decode()).groups()
    nbytes = float(size.replace(",", "")) * 1e6
    return {"bytes": nbytes, "seconds": float(took), "bytes_per_s": nbytes / float(took)}


if __name__ == "__main__":
    sys.exit(main())
