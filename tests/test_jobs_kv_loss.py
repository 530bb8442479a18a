"""The loss of narrow caches, measured: against scoring by hand, and as the command tells it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headrace.cli import main
from headrace.errors import BadRequest
from headrace.formats.index import open_model
from headrace.jobs.kv_loss import kv_losses
from headrace.kernels.dispatch import make_device
from headrace.memory.kv import HostKV, kv_shapes
from headrace.memory.weights import Resident
from headrace.model.layers import load_model
from headrace.options import Options
from headrace.run.score import ScoringComputer, log_probabilities
from headrace.text.prose import TEXT
from helpers_chat import chat_model

OPTIONS = Options(threads=1, rows=64, sequences=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("loss") / "tiny.gguf", blocks=2)


def test_losses_are_those_of_scores_by_hand(model: Path) -> None:
    losses = list(kv_losses(model, TEXT, OPTIONS, 200))
    assert [loss.bits for loss in losses] == ["16/16", "8/8", "8/4", "4/4"]
    assert all(loss.tokens == 199 for loss in losses)
    assert losses[0].loss == losses[0].error == 0.0
    file = open_model(model)
    layers = load_model(file)
    device = make_device("cpu", threads=1)
    every = range(len(layers.layers))
    ids = list(TEXT.encode()[:200])
    for loss, bits in zip(losses, ((16, 16), (8, 8), (8, 4), (4, 4)), strict=True):
        cache = HostKV(device, kv_shapes(layers.layers, bits), 7)
        weights = Resident(device, layers, every)
        computer = ScoringComputer(device, layers.layers, every, layers.spec.width, weights, cache)
        found = log_probabilities(computer, ids)
        assert loss.perplexity == pytest.approx(float(np.exp(-found.mean())), rel=1e-12)
        assert loss.loss == pytest.approx(loss.perplexity / losses[0].perplexity - 1, abs=1e-9)
    assert abs(losses[1].loss) < abs(losses[3].loss) + losses[3].error
    sizes = [loss.token_nbytes for loss in losses]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 2 * 2 * 2 * 32 * 2


def test_a_text_that_says_nothing_is_refused(model: Path) -> None:
    with pytest.raises(BadRequest, match="5 tokens"):
        list(kv_losses(model, "short", OPTIONS))


def test_the_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "--kv", str(model), "--tokens", "100", "-t", "1"]
    assert main.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["kv"]
    assert [f["bits"] for f in found] == ["16/16", "8/8", "8/4", "4/4"] and found[0]["tokens"] == 99
    assert main.main(words) == 0
    shown = capsys.readouterr().out
    assert "built-in" in shown and "%" in shown and "4/4" in shown
    (tmp_path / "mine").write_text("my own words, " * 20)
    assert main.main([*words, "--text", str(tmp_path / "mine")]) == 0
    assert "your text" in capsys.readouterr().out
    assert main.main(["check", "--text", "x"]) == 2
    assert "--kv MODEL" in capsys.readouterr().err
