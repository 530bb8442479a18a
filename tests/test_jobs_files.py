"""What can go wrong around a batch job: signals, files that are there, states of others, full disks."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.engine import Engine, load
from headrace.errors import BadFile, BadRequest, HeadraceError, Unavailable
from headrace.jobs import rows as rows_module
from headrace.jobs import state as state_module
from headrace.jobs.batch import Batch, Report
from headrace.jobs.state import State
from helpers_chat import SMALL, chat_model, compute, mixed, row, write_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("batch") / "tiny.gguf", blocks=2)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with load(model, **SMALL) as engine:
        yield engine
        while not engine.parts.loop.idle:
            engine.work()
        assert engine.head.idle and engine.head.check_integrity() == []


@pytest.fixture(scope="module")
def truth(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """(input, output) of an undisturbed job."""
    folder = tmp_path_factory.mktemp("truth")
    compute(engine, folder, [*mixed(40), "bad", row("last", {"prompt": "x", "max_tokens": 3})])
    return folder / "in.jsonl", (folder / "out.jsonl").read_bytes()


def stop_after(rows: int) -> tuple[list[Batch], Callable[[Report], None]]:
    """A ``tell`` that interrupts its job once so many rows are done."""
    batch: list[Batch] = []

    def tell(report: Report) -> None:
        if report.rows >= rows:
            batch[0].interrupt()

    return batch, tell


def interrupted(engine: Engine, source: Path, target: Path, rows: int, **settings: Any) -> None:
    holder, tell = stop_after(rows)
    holder.append(Batch(engine, source, target, tell=tell, **settings))
    with pytest.raises(KeyboardInterrupt):
        holder[0].run()
    assert engine.head.idle and engine.head.check_integrity() == []
    assert all(job.finish for job in engine._jobs.values())
    assert not target.exists()


@pytest.mark.parametrize("rows", [0, 1, 20, 41])
def test_ctrl_c_gives_everything_back_and_the_job_goes_on(
    engine: Engine, truth: tuple[Path, bytes], tmp_path: Path, rows: int
) -> None:
    out = tmp_path / "out"
    interrupted(engine, truth[0], out, rows)
    with State(tmp_path / "out.state") as state:
        assert rows <= state.progress().rows < 42
    report = Batch(engine, truth[0], out).run()
    assert report.resumed >= rows and out.read_bytes() == truth[1]


def test_a_finished_job_is_not_done_again(engine: Engine, truth: tuple[Path, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = Batch(engine, truth[0], out).run()
    again = Batch(engine, truth[0], out).run()
    assert (again.rows, again.failed, again.tokens) == (first.rows, first.failed, 0)
    assert out.read_bytes() == truth[1]
    for other in (Batch(engine, truth[0], out, seed=1), Batch(engine, truth[0], out, names=("tiny",))):
        with pytest.raises(BadRequest, match="there already"):
            other.run()
    assert Batch(engine, truth[0], out, restart=True).run().tokens == first.tokens
    assert out.read_bytes() == truth[1]


@pytest.mark.parametrize("content", [b"", b"notes\n", b'{"id": "x", "error": null}\n', b"[]\n", b"\xff"])
def test_another_file_is_never_overwritten(
    engine: Engine, truth: tuple[Path, bytes], tmp_path: Path, content: bytes
) -> None:
    out = tmp_path / "out"
    out.write_bytes(content)
    with pytest.raises(BadRequest, match="there already"):
        Batch(engine, truth[0], out).run()
    assert out.read_bytes() == content


def test_a_cut_output_is_no_output(engine: Engine, truth: tuple[Path, bytes], tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"".join(truth[1].splitlines(keepends=True)[:-1]))
    with pytest.raises(BadRequest, match="there already"):
        Batch(engine, truth[0], tmp_path / "out").run()


def test_the_state_of_another_job_is_refused(engine: Engine, truth: tuple[Path, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupted(engine, truth[0], out, 5)
    changed = write_rows(tmp_path / "in", [row("a", {"prompt": "x"})])
    for other, word in (
        (Batch(engine, truth[0], out, seed=1), "seed 0"),
        (Batch(engine, changed, out), "input"),
        (Batch(engine, truth[0], out, names=("tiny",)), "names"),
    ):
        with pytest.raises(BadRequest, match=word):
            other.run()
    assert Batch(engine, changed, out, restart=True).run().total == 1


def test_a_state_in_use_is_left_alone(
    engine: Engine, truth: tuple[Path, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "PATIENCE", 0.05)
    with State(tmp_path / "out.state"):
        for restart in (False, True):
            with pytest.raises(BadFile, match="in use"):
                Batch(engine, truth[0], tmp_path / "out", restart=restart).run()


@pytest.mark.parametrize("kind", ["nfs4", "ext4"])
def test_the_journal_suits_the_file_system(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "file_system", lambda folder: kind)
    with State(tmp_path / "s") as state:
        mode = state._db.execute("pragma journal_mode").fetchone()[0]
        assert mode == state.journal == ("delete" if kind == "nfs4" else "wal")


def test_what_is_no_state_is_left_alone(engine: Engine, truth: tuple[Path, bytes], tmp_path: Path) -> None:
    path = tmp_path / "out.state"
    path.write_text("my notes, " * 1000)
    for restart in (False, True):
        with pytest.raises(BadFile, match="no job's state"):
            Batch(engine, truth[0], tmp_path / "out", restart=restart).run()
    assert path.read_text() == "my notes, " * 1000


def test_paths_that_cant_be(engine: Engine, truth: tuple[Path, bytes], tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in", [row("a", {"prompt": "x"})])
    (tmp_path / "empty").write_bytes(b"\n \n")
    for batch, word in (
        (Batch(engine, tmp_path / "none", tmp_path / "out"), "no such batch file"),
        (Batch(engine, tmp_path, tmp_path / "out"), "directory"),
        (Batch(engine, tmp_path / "empty", tmp_path / "out"), "no rows"),
        (Batch(engine, source, tmp_path / "no" / "out"), "no such folder"),
        (Batch(engine, source, tmp_path), "is a folder"),
        (Batch(engine, source, source), "input itself"),
        (Batch(engine, source, source, restart=True), "input itself"),
        (Batch(engine, source, Path("/proc/out")), "writable"),
    ):
        with pytest.raises(HeadraceError, match=word):
            batch.run()
    assert source.exists()


def test_a_huge_line_is_one_bad_row(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "MAX_LINE", 2000)
    good = row("a", {"prompt": "x", "max_tokens": 2})
    whole = json.dumps(row("fits", {"prompt": "x", "max_tokens": 2}))
    fits = whole[:-1] + " " * (1999 - len(whole)) + "}"
    rows = [good, json.dumps(row("b", {"prompt": "x" * 9000})), fits, {**good, "custom_id": "c"}]
    found = compute(engine, tmp_path, rows)
    assert [f["error"] is None for f in found] == [True, False, True, True]
    assert "MiB" in found[1]["error"]["message"] and found[1]["custom_id"] is None


def test_an_input_changed_midway_is_noticed(engine: Engine, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in", mixed(30))

    def tell(report: Report) -> None:
        with source.open("ab") as f:
            f.write(b"\n")

    with pytest.raises(BadFile, match="was changed"):
        Batch(engine, source, tmp_path / "out", tell=tell).run()
    assert engine.head.idle and not (tmp_path / "out").exists()


def test_the_time_left_counts_what_is_there_of_unfinished_rows(engine: Engine, tmp_path: Path) -> None:
    seen: list[Report] = []
    source = write_rows(
        tmp_path / "in", [row(str(i), {"prompt": "x", "max_tokens": 20, "ignore_eos": True}) for i in range(4)]
    )
    Batch(engine, source, tmp_path / "out", tell=seen.append).run()
    midway = [r for r in seen if r.rows == 0 and r.tokens]
    assert midway and all(r.eta is not None for r in midway)
    for r in midway:
        there = r.tokens / 20
        assert r.under_way == pytest.approx(there) and r.eta == pytest.approx(r.seconds / there * (4 - there))
    assert seen[-1].rows == 4 and seen[-1].under_way == 0.0


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Callable[[int], None]]:
    """A file system of so many bytes; gives a function that makes it larger."""
    folder.mkdir()

    def mount(*options: str) -> int:
        return subprocess.run(["mount", *options, str(folder)], capture_output=True, check=False).returncode

    if mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs"):
        pytest.skip("this user may not mount a small disk")
    try:
        yield lambda larger: (mount("-o", f"remount,size={larger}"), None)[1]
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("size", [8 << 10, 48 << 10, 160 << 10])
def test_a_full_disk_ends_the_job_and_loses_nothing(
    engine: Engine, truth: tuple[Path, bytes], tmp_path: Path, size: int
) -> None:
    with small_disk(tmp_path / "disk", size) as grow:
        out = tmp_path / "disk" / "out"
        while not engine.parts.loop.idle:  # the run before may have left one that gives slots back
            engine.work()
        with pytest.raises((Unavailable, BadFile), match="room"):
            Batch(engine, truth[0], out).run()
        assert not out.exists() and engine.head.idle and engine.head.check_integrity() == []
        grow(4 << 20)
        Batch(engine, truth[0], out).run()
        assert out.read_bytes() == truth[1]
