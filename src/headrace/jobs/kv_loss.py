"""What a narrow cache costs a model: how likely it finds a text with its keys and values at each preset of bits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.errors import BadRequest
from headrace.kernels.device import PAGE
from headrace.kernels.dispatch import make_device
from headrace.memory.budget import Budget
from headrace.memory.kv import PRESETS, HostKV, kv_shapes, page_nbytes
from headrace.memory.slots import pages_for
from headrace.model.layers import load_model
from headrace.options import Options
from headrace.placement import load_weights, open_file, place
from headrace.run.score import ScoringComputer, log_probabilities, perplexity
from headrace.text.tokenizer import Tokenizer

ROWS = 64
FEWEST = 32
"""Tokens under which a text says nothing."""


@dataclass(frozen=True)
class Loss:
    """At ``bits`` of K and V. loss: perplexity over that of 16/16, less 1; error: of it, one standard deviation.

    The error is the text's: another text of the same kind would give a loss about that far away.
    """

    bits: str
    token_nbytes: int
    tokens: int
    perplexity: float
    loss: float
    error: float


def kv_losses(path: Path, text: str, options: Options, tokens: int = 512) -> Iterator[Loss]:
    """A model's loss at each preset, 16/16 first, over the first ``tokens`` of the text. Raises a HeadraceError."""
    with open_file(path, options) as file:
        model = load_model(file)
        tokenizer = Tokenizer.from_metadata(file.metadata)
        tokenizer.check_model(model.spec.vocab)
        ids = tokenizer.encode(text)[: min(tokens, model.spec.context)]
        if len(ids) < FEWEST:
            raise BadRequest(f"The text has {len(ids)} tokens; give one of at least {FEWEST}, better some hundred.")
        device = make_device(options.device, threads=options.threads, cpu=options.cpu)
        pages, every, truth = pages_for(len(ids)), range(len(model.layers)), None
        streamed = place(Budget(options.ram), device, model, pages, options)
        with closing(load_weights(device, model, streamed, options)) as weights:
            for name, bits in PRESETS.items():
                cache = HostKV(device, kv_shapes(model.layers, bits), pages)
                computer = ScoringComputer(device, model.layers, every, model.spec.width, weights, cache)
                with closing(computer):
                    found = log_probabilities(computer, ids, ROWS)
                if not np.isfinite(found).all():
                    raise BadRequest(f"At {name} KV bits the model's output isn't finite; its file may be damaged.")
                truth = found if truth is None else truth
                lost = truth - found
                error = float(lost.std(ddof=1)) / math.sqrt(len(lost))
                size = page_nbytes(device, model.layers, bits) // PAGE
                loss = math.exp(lost.mean()) - 1
                yield Loss(name, size, len(found), perplexity(found), loss, error * (1 + loss))
