"""Record a real pair for the simulator: where the target's own text is in the draft's lists.

    python benchmarks/record_pair.py TARGET DRAFT --out pair.json [--prompts 12] [--tokens 128] [--width 5]

The target answers prompts of spec_bench_dev.jsonl greedily; the draft then reads each answer and says at every place
what it would have guessed. Models must share a vocabulary. The file has "ranks" (the place of the target's token in the
draft's list, -1: not in it), "probabilities" (what the draft said), and where they come from; ``headrace simulate
--acceptance pair.json`` and ``speculation_table.py --trace pair.json`` read it. Prints how often each place was right.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from math import exp
from pathlib import Path

from headrace.engine import Engine, load
from headrace.run.stage import Stage
from headrace.run.types import Append, CacheOp, Choice, Params, Result, Row, RunMessage, Sampling, Step
from headrace.text.template import ChatTemplate

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "spec_bench_dev.jsonl"
CONTEXT, ROWS = 1024, 64
LONGEST = 400
"""Prompt tokens; longer prompts are left out."""


def prompts(engine: Engine, count: int) -> list[list[int]]:
    """From all categories: every n-th of the short ones."""
    template = ChatTemplate(engine.tokenizer)
    asked = [json.loads(line) for line in DATA.read_text().splitlines()]
    ids = [template.encode([{"role": "user", "content": row["turns"][0]}]) for row in asked]
    short = [i for i in ids if len(i) <= LONGEST]
    return short[:: max(1, len(short) // count)][:count]


class Reader:
    """A model asked for its choices, with the ``width`` likeliest, in one sequence of its cache."""

    def __init__(self, engine: Engine, width: int) -> None:
        self._computer = engine.parts.loop.stages[0][1]
        total = len(engine.parts.model.layers)
        self._stage, self._runs = Stage(0, total, total), 0
        self._params = Params(0, Sampling(logprobs=width + 1))
        self._read = 0

    def read(self, ids: Sequence[int]) -> list[Choice]:
        """What it would choose after each token of a text."""
        found: list[Choice] = []
        for start in range(0, len(ids), ROWS):
            part = range(start, min(len(ids), start + ROWS))
            rows = tuple(Row(0, i, ids[i], i, wanted=True) for i in part)
            found += self._run((Append(0, tuple(part), tuple(ids[i] for i in part)), self._params), rows)
        self._read = len(ids)
        return found

    def beside(self, at: int, path: Sequence[int]) -> Choice:
        """What it would choose after the text up to ``at`` and then other tokens."""
        slots = tuple(range(self._read, self._read + len(path)))
        rows = (Row(0, at + 1 + i, t, slots[i], True, True, slots[:i]) for i, t in enumerate(path))
        return self._run((), tuple(rows))[-1]

    def _run(self, ops: tuple[CacheOp, ...], rows: tuple[Row, ...]) -> tuple[Choice, ...]:
        stage, number = self._stage, self._runs
        self._runs += 1
        effects = stage.on_event(RunMessage(0, number, False, ops, rows), 0.0)
        while isinstance(step := effects[0], Step):
            self._computer.step(step.layer, stage.runs[step.run])
            effects = stage.on_event(step, 0.0)
        assert isinstance(effects[0], Result)
        return effects[0].choices


def said(engine: Engine, ids: list[int], width: int) -> list[Choice]:
    """What the draft would choose after each token."""
    return Reader(engine, width).read(ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--width", type=int, default=5)
    args = parser.parse_args()
    with load(args.target, context=CONTEXT, caches=4) as target:
        asked = prompts(target, args.prompts)
        answers = [list(done.tokens) for done in target.generate(asked, max_tokens=args.tokens)]
    ranks: list[int] = []
    probabilities: list[list[float]] = []
    with load(args.draft, context=CONTEXT) as draft:
        for prompt, answer in zip(asked, answers, strict=True):
            choices = said(draft, [*prompt, *answer], args.width)
            for token, choice in zip(answer, choices[len(prompt) - 1 :], strict=False):
                listed = [choice.token, *(t for t, _ in choice.top if t != choice.token)][: args.width]
                chances = dict(choice.top) | {choice.token: choice.logprob}
                ranks.append(listed.index(token) if token in listed else -1)
                probabilities.append([round(exp(chances[t]), 5) for t in listed])
    places = Counter(ranks)
    shares = {str(r): round(places[r] / len(ranks), 4) for r in (*range(args.width), -1)}
    about = {"target": args.target.name, "draft": args.draft.name, "positions": len(ranks), "shares": shares}
    args.out.write_text(json.dumps({"ranks": ranks, "probabilities": probabilities, "about": about}))
    print(json.dumps(about))


if __name__ == "__main__":
    main()
