"""Standard streams that are closed or full, and a disk without room: one line, no traceback, nothing left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.errors import OverBudget
from headrace.formats import pack as packing
from headrace.formats.pack import PackWriter, plan_pack
from helpers_tiny import tiny_model

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", text=True)


def shell(model: Path, rest: str) -> subprocess.CompletedProcess[str]:
    command = f'"{sys.executable}" -m headrace run -m "{model}" -t 1 -n 3 {rest}'
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, errors="replace")


@pytest.mark.parametrize("rest, status", [("hi >&-", 0), ("hi 2>&-", 0), ("hi <&-", 0), ("-f - <&-", 2)])
def test_a_closed_stream(model: Path, rest: str, status: int) -> None:
    done = shell(model, rest)
    assert (done.returncode, "Traceback" in done.stderr) == (status, False)
    if status:
        assert done.stderr == "headrace: The prompt is empty; give some text.\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("rest", ["hi", "--json hi"])
def test_output_that_cannot_be_written(model: Path, rest: str) -> None:
    done = shell(model, f"{rest} >/dev/full")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("headrace: The output can't be written: No space left")
    assert "Traceback" not in done.stderr


def test_packing_refused_for_lack_of_room_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "free_bytes", lambda folder: 1)
    writer = PackWriter(tmp_path, plan_pack("source", "cpu", 1, {"0": [("a", "F32", 1, 1, 4)]}))
    with pytest.raises(OverBudget, match="are free"):
        writer.write(lambda key, tensor, out: None)
    assert list(tmp_path.iterdir()) == []
