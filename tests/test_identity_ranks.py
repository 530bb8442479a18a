"""A cut of ``benchmarks/identity.py``: SmolLM2 over real ranks with every drafter, and over hosts of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers_hosts import Hosts, needs_hosts
from helpers_mpi import needs_mpi
from helpers_text import smollm2
from identity import measure
from inflate import inflate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """SmolLM2, and its weights rounded anew: a draft that is nearly always right."""
    draft = tmp_path_factory.mktemp("identity") / "draft.gguf"
    inflate(smollm2(), draft, 0, "Q4_0", 0.0)
    return smollm2(), draft


def check(found: dict[str, Any], settings: int) -> None:
    assert found["settings"] == found["identical"] == settings
    assert found["wrong"] == 0
    for result in found["results"]:
        trace = result["trace"]
        assert (trace["guesses"], trace["right"]) == (result["launched"], result["accepted"])
    assert [r for r in found["results"] if not r["all_three"]] == []


@needs_mpi
def test_ranks_of_one_machine(models: tuple[Path, Path]) -> None:
    check(measure(models, (1, 3), 24, 16, ("ngram", "layers", "model")), 24)


@needs_mpi
@needs_hosts
def test_hosts_with_addresses_of_their_own(models: tuple[Path, Path]) -> None:
    with Hosts(3) as hosts:
        found = measure(models, (3,), 8, 16, ("model",), hosts)
    check(found, 4)
    assert {len(result["hosts"]) for result in found["results"]} == {3}
