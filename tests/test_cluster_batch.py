"""``mpirun headrace batch``: several blocks in flight, streaming ranks too; the output file is one process's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.plan.machine import Compute, Link, Machine, Tier
from helpers_chat import chat, chat_model, row, write_rows
from helpers_mpi import command, environment, needs_mpi
from helpers_text import smollm2

pytestmark = needs_mpi


def rows(count: int) -> list[dict[str, object]]:
    """Prompts and answers of unlike lengths, greedy and sampled, and a bad row."""
    made: list[dict[str, object]] = []
    for i in range(count):
        body = {"max_tokens": 3 + i % 9, "temperature": 0.7 * (i % 2), "ignore_eos": True}
        text = "word " * (1 + 5 * i % 23)
        made.append(chat(f"c{i}", text, **body) if i % 3 else row(f"p{i}", {"prompt": text, **body}))
    return [*made, row("bad", {"prompt": 7})]


def batch(source: Path, target: Path, model: Path, *words: object) -> list[str]:
    asked = ("batch", source, "-o", target, "-m", model, "-t", "1", "-c", "256", "--any-model", *words)
    return [sys.executable, "-m", "headrace", *map(str, asked)]


def constants(path: Path, flops: float, disk: float) -> Path:
    tiers = Tier("host", 1 << 40, 1e12, 1e12), Tier("disk", 1 << 40, disk, disk)
    links = (Link("disk", "host", disk, resource="disk"),)
    machine = Machine("test", tiers, links, (Compute("host", ((1, flops),), 1e12, 1e12),))
    path.write_text(machine.to_json())
    return path


def test_a_slower_rank_has_fewer_layers_and_the_output_is_the_same(tmp_path: Path) -> None:
    model = chat_model(tmp_path / "chat.gguf", blocks=9)
    source, one, many = tmp_path / "in.jsonl", tmp_path / "one.jsonl", tmp_path / "many.jsonl"
    write_rows(source, rows(12))
    alone = subprocess.run(batch(source, one, model), env=environment(), capture_output=True, text=True, timeout=300)
    assert alone.returncode == 1, alone.stderr  # one row is bad
    fast, slow = constants(tmp_path / "fast.json", 1e9, 1e9), constants(tmp_path / "slow.json", 4e8, 1e9)
    first, second = (batch(source, many, model, "--machine", file)[1:] for file in (fast, slow))
    job = [*command(1)[:-1], sys.executable, *first, ":", "-n", "1", sys.executable, *second]
    done = subprocess.run(job, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    assert one.read_bytes() == many.read_bytes()
    told = next(line for line in done.stderr.splitlines() if line.startswith("rank 0 on host"))
    layers = [int(part.split(": ")[1].split()[0]) for part in told.split(". ")[0].split("; ")]
    assert sum(layers) == 11 and layers[0] > layers[1], told
    assert "computes at 40% of the fastest" in told and "blocks under way" in told


@pytest.mark.slow
def test_streaming_ranks_give_the_same_output(tmp_path: Path) -> None:
    source, one, many = tmp_path / "in.jsonl", tmp_path / "one.jsonl", tmp_path / "many.jsonl"
    write_rows(source, rows(20))
    subprocess.run(batch(source, one, smollm2()), env=environment(), capture_output=True, timeout=300)
    assert json.loads(one.read_text().splitlines()[0])["response"]
    file = constants(tmp_path / "machine.json", 1e10, 1e9)
    words = batch(source, many, smollm2(), "--ram", "190M", "--machine", file)[1:]
    done = subprocess.run(command(3, *words), env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stderr
    assert one.read_bytes() == many.read_bytes()
    assert "streamed, waiting for the disk" in done.stderr, "190 MB a rank were too many for this test"
