"""``headrace check --kv MODEL``: what a narrow cache costs this model, measured."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from headrace import system
from headrace.cli.generation import find_named, read_text, waiting
from headrace.cli.show import human, note, table


def run(args: argparse.Namespace) -> int:
    """Measure, and print a table or JSON."""
    path = find_named(args.kv)
    from headrace.jobs.kv_loss import kv_losses
    from headrace.options import Options
    from headrace.text.prose import TEXT

    text = read_text(args.text) if args.text is not None else TEXT
    options = Options(threads=args.threads or system.cores(), rows=64, sequences=1, tell=note)
    with waiting(f"reading {args.tokens} tokens with four caches"):
        losses = list(kv_losses(path, text, options, args.tokens))
    if args.json:
        print(json.dumps({"model": str(path), "kv": [asdict(loss) for loss in losses]}, indent=1))
        return 0
    rows: list[tuple[str, ...]] = [("KV bits", "a token", "perplexity", "loss")]
    for i, loss in enumerate(losses):
        lost = f"{100 * loss.loss:+.2f}% ± {100 * loss.error:.2f}" if i else ""
        rows.append((loss.bits, human(loss.token_nbytes), f"{loss.perplexity:.3f}", lost))
    print(table(rows, right=(1, 2)))
    whose = "of your text" if args.text is not None else "of a built-in English text (--text measures on yours)"
    print(f"\nOver {losses[0].tokens} tokens {whose}; ± is one standard deviation. The default is 16/16 (--kv-bits).")
    return 0
