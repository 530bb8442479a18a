"""Deterministic testing at length: random clusters in virtual time against plain decoding.

    python benchmarks/simulate_seeds.py [--start 0] [--count 100000]

One process, one core; prints each failing seed (``headrace.simulate.check.run_seed(seed)`` repeats it) and the rate.
"""

from __future__ import annotations

import argparse
import sys
import time

from headrace.simulate.check import run_seed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--count", type=int, default=100_000)
    args = parser.parse_args()
    start, failed = time.perf_counter(), 0
    for done, seed in enumerate(range(args.start, args.start + args.count), 1):
        if wrong := run_seed(seed):
            failed += 1
            print(wrong, flush=True)
        if done % 5000 == 0 or done == args.count:
            took = time.perf_counter() - start
            cpu = time.process_time()
            print(
                f"{done} seeds, {failed} failed, {done / took:.0f} a second ({done / cpu:.0f} a CPU second)", flush=True
            )
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
