"""A real pair of models that agree at three of four places, and a text on which they do: SmolLM2 and noise."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import exp
from pathlib import Path

from headrace.config import resolve
from headrace.engine import Engine, load
from headrace.run.types import Choice
from headrace.simulate.acceptance import Recorded
from identity import prompts
from inflate import inflate
from model_zoo import smollm2
from record_pair import Reader, said

NOISE = 2.4
"""Of the weights added to each block's feed-forward part (``inflate.py``)."""
AGREE = 0.75


def noisy() -> Path:
    path = resolve().cache / "benchmarks" / f"smollm2-noise-{NOISE:g}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        inflate(smollm2(), path, int(0.13e9), None, NOISE)
    return path


def text_of(model: Path, draft: Path, tokens: int) -> tuple[list[int], list[int], Recorded, dict[str, float]]:
    """(prompt, answer, where the draft is right), of the prompt whose text is nearest to ``AGREE``; and agreements."""
    asked = [ids[:24] for ids in prompts(model, 12)]
    with load(model, threads=2, context=256, caches=4) as engine:
        answers = [list(done.tokens) for done in engine.generate(asked, max_tokens=tokens, ignore_eos=True)]
    found = []
    with load(draft, threads=2, context=256) as engine:
        for prompt, answer in zip(asked, answers, strict=True):
            choices = said(engine, [*prompt, *answer], 5)
            ranks, chances = [], []
            for token, choice in zip(answer, choices[len(prompt) - 1 :], strict=False):
                listed = [choice.token, *(t for t, _ in choice.top if t != choice.token)][:5]
                logs = dict(choice.top) | {choice.token: choice.logprob}
                ranks.append(listed.index(token) if token in listed else -1)
                chances.append([exp(logs[t]) for t in listed])
            found.append((ranks.count(0) / len(ranks), prompt, answer, ranks, chances))
    agreed, prompt, answer, ranks, chances = min(found, key=lambda f: abs(f[0] - AGREE))
    agreements = {"of this text": round(agreed, 3), "of all": round(statistics.mean(f[0] for f in found), 3)}
    return prompt, answer, Recorded(ranks, chances, len(prompt)), agreements


class Drafts:
    """What the draft says after part of a text, and after tokens that aren't the text's; each is asked once."""

    def __init__(self, engine: Engine, text: Sequence[int], width: int) -> None:
        self.text, self._reader = text, Reader(engine, width)
        self._said = {(at, ()): choice for at, choice in enumerate(self._reader.read(text))}

    def after(self, at: int, path: tuple[int, ...]) -> Choice:
        """After ``text[: at + 1]`` and the path."""
        while path and at + 1 < len(self.text) and path[0] == self.text[at + 1]:
            at, path = at + 1, path[1:]
        if (at, path) not in self._said:
            self._said[at, path] = self._reader.beside(at, path)
        return self._said[at, path]
