"""The packed file: what is written is read, an interrupted packing goes on, damage and a full disk are refused."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import headrace.formats.pack as pack
from headrace.errors import BadFile, OverBudget
from headrace.formats.files import open_shared, try_lock
from headrace.formats.pack import PackedTensor, PackFile, PackPlan, PackWriter, plan_pack

LAYERS = {
    "embed": [("embed", "Q8_0", 100, 32, 3400)],
    "block.0": [("attn_q", "Q4_0", 64, 64, 2304), ("norm", "F32", 1, 64, 256), ("odd", "F32", 1, 3, 12)],
    "block.1": [("attn_q", "Q4_0", 64, 64, 5000)],
    "empty": [],
    "output": [("out_norm", "F32", 1, 64, 256)],
}


def plan(source: str = "abc", layout: int = 1) -> PackPlan:
    return plan_pack(source, "cpu", layout, LAYERS)


def fill(layer: str, t: PackedTensor, out: np.ndarray) -> None:
    assert out.ctypes.data % 64 == 0 and out.shape == (t.nbytes,) and not out.any()
    out[:] = np.frombuffer((f"{layer}/{t.name} " * (t.nbytes // 8 + 1)).encode()[: t.nbytes], np.uint8)


def check_content(file: PackFile) -> None:
    raw = file.path.read_bytes()
    for layer, tensors in LAYERS.items():
        e = file.layers[layer]
        assert e.offset % 4096 == 0 and e.nbytes % 4096 == 0
        assert [(t.name, t.fmt, t.n, t.k, t.nbytes) for t in e.tensors] == tensors
        for t in e.tensors:
            want = np.zeros(t.nbytes, np.uint8)
            start = e.offset + t.offset
            assert t.offset % 64 == 0 and start + t.nbytes <= e.offset + e.nbytes <= len(raw)
            expected = np.array(want)
            expected[:] = np.frombuffer((f"{layer}/{t.name} " * (t.nbytes // 8 + 1)).encode()[: t.nbytes], np.uint8)
            assert raw[start : start + t.nbytes] == expected.tobytes()


def test_what_is_packed_is_read(tmp_path: Path) -> None:
    w = PackWriter(tmp_path / "cache", plan())
    assert w.finished() is None and f"{plan().nbytes / 1e9:.2f} GB" in w.statement()
    said: list[str] = []
    statement = w.statement()
    file = w.write(fill, said.append)
    assert said == [statement]
    check_content(file)
    assert file.path.stat().st_size == plan().nbytes and w.finished() == file
    assert [p.name for p in file.path.parent.iterdir()] == [file.path.name]

    assert w.write(never).path == file.path  # it is there: nothing to do


def test_the_name_is_the_content() -> None:
    other = plan_pack("abc", "cpu", 1, {**LAYERS, "embed": [("embed", "Q4_0", 100, 32, 1800)]})
    keys = {plan().key, plan("abd").key, plan(layout=2).key, plan_pack("abc", "torch", 1, LAYERS).key, other.key}
    assert len(keys) == 5 and plan().key == plan().key


@pytest.mark.parametrize("stop_at", ["embed", "norm", "out_norm"])
def test_an_interrupted_packing_goes_on(tmp_path: Path, stop_at: str) -> None:
    packed: list[str] = []

    def once(layer: str, t: PackedTensor, out: np.ndarray) -> None:
        if t.name == stop_at:
            raise KeyboardInterrupt
        fill(layer, t, out)

    def counted(layer: str, t: PackedTensor, out: np.ndarray) -> None:
        packed.append(layer)
        fill(layer, t, out)

    w = PackWriter(tmp_path, plan())
    with pytest.raises(KeyboardInterrupt):
        w.write(once)
    assert w.finished() is None
    file = w.write(counted)
    check_content(file)
    order = list(LAYERS)
    stopped = next(i for i, k in enumerate(order) if stop_at in [t[0] for t in LAYERS[k]])
    assert set(packed) == {k for k in order[stopped:] if LAYERS[k]}


@pytest.mark.parametrize(
    "journal", [b"", b"[]\n", b"\xff\xfe\n{\n", b'["embed", "00"]\n', b'["nothing", 3]\n', b"[[1], 2]\n"]
)
def test_a_journal_is_not_believed(tmp_path: Path, journal: bytes) -> None:
    w = PackWriter(tmp_path, plan())
    w.journal.write_bytes(journal)
    w.part.write_bytes(b"other bytes")
    check_content(w.write(fill))


def test_a_finished_layer_that_was_damaged_is_packed_again(tmp_path: Path) -> None:
    def stop(layer: str, t: PackedTensor, out: np.ndarray) -> None:
        if layer == "output":
            raise KeyboardInterrupt
        fill(layer, t, out)

    w = PackWriter(tmp_path, plan())
    with pytest.raises(KeyboardInterrupt):
        w.write(stop)
    with w.part.open("r+b") as f:
        f.seek(w.plan.layers["block.1"].offset + 77)
        f.write(b"?")
    file = w.write(fill)
    check_content(file)


def never(*a: object) -> None:
    raise AssertionError("packed twice")


def test_two_writers_at_once_make_one_file(tmp_path: Path) -> None:
    """The second waits for the first, says so in one line, and takes what that made."""
    begun, go_on, said = threading.Event(), threading.Event(), queue.Queue[str]()

    def slowly(layer: str, t: PackedTensor, out: np.ndarray) -> None:
        begun.set()
        assert go_on.wait(30)
        fill(layer, t, out)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(PackWriter(tmp_path, plan()).write, slowly)
        assert begun.wait(30)
        second = pool.submit(PackWriter(tmp_path, plan()).write, never, said.put)
        notice = said.get(timeout=30)
        assert "Another process is packing this model" in notice and "waiting" in notice
        assert not first.done() and not second.done()
        go_on.set()
        assert first.result(30) == second.result(30)
    check_content(second.result())
    assert said.empty() and [p.name for p in tmp_path.iterdir()] == [second.result().path.name]


def test_a_writer_that_dies_is_taken_over(tmp_path: Path) -> None:
    """The waiting one goes on after the last layer that the killed process finished."""
    here = Path(__file__).parent
    code = f"""
import sys, time
sys.path.insert(0, {str(here)!r})
from test_formats_pack import PackWriter, Path, fill, plan
def slowly(layer, t, out):
    if layer == "block.1":
        print("begun", flush=True)
        time.sleep(600)
    fill(layer, t, out)
PackWriter(Path({str(tmp_path)!r}), plan()).write(slowly)
"""
    packed: list[str] = []

    def counted(layer: str, t: PackedTensor, out: np.ndarray) -> None:
        packed.append(layer)
        fill(layer, t, out)

    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        said = queue.Queue[str]()
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(PackWriter(tmp_path, plan()).write, counted, said.put)
            assert "waiting" in said.get(timeout=30) and not second.done()
            process.kill()
            check_content(second.result(30))
    finally:
        process.kill()
        process.communicate()
    assert set(packed) == {"block.1", "output"} and said.get_nowait().startswith("Packing writes") and said.empty()


def test_a_writer_that_gives_up_takes_its_file_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that waited for it begins anew."""
    w = PackWriter(tmp_path, plan())
    fd = open_shared(w.part)
    assert try_lock(fd)
    said = queue.Queue[str]()
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(w.write, fill, said.put)
        assert "waiting" in said.get(timeout=30)
        w.part.unlink()
        os.close(fd)
        check_content(second.result(30))


def test_too_little_disk_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "free_bytes", lambda folder: 5_000_000)
    w = PackWriter(tmp_path, plan())
    with pytest.raises(OverBudget, match=r"needs 0\.02 GB .* 0\.01 GB are free; free 0\.01 GB"):
        w.write(lambda *a: pytest.fail("packed"))


def test_a_disk_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: memoryview, offset: int) -> None:
        raise OSError(28, "No space left on device")

    w = PackWriter(tmp_path, plan())
    with monkeypatch.context() as m:
        m.setattr(pack, "write_exact", full)
        with pytest.raises(OverBudget, match="disk is full"):
            w.write(fill)
    check_content(w.write(fill))


def test_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BadFile, match="choose another folder for packed files"):
        PackWriter(tmp_path / "file" / "cache", plan()).write(fill)


def seal(header: bytes) -> bytes:
    """The beginning of a file whose header has a right checksum, whatever it says."""
    return struct.pack("<8sII", pack.MAGIC, len(header), 0) + hashlib.blake2b(header, digest_size=16).digest() + header


def edit(change: Callable[[dict], object]) -> bytes:
    body = json.loads(plan().head({})[32:])
    change(body)
    return seal(json.dumps(body, separators=(",", ":")).encode()) + bytes(40000)


HOSTILE = {
    "empty": b"",
    "short": pack.MAGIC,
    "other magic": bytes(5000),
    "long header": struct.pack("<8sII", pack.MAGIC, 2**32 - 1, 0) + bytes(100),
    "wrong checksum": struct.pack("<8sII", pack.MAGIC, 2, 0) + bytes(16) + b"{}",
    "not JSON": seal(b"\xff{"),
    "not an object": seal(b"[1]"),
    "no fields": seal(b"{}"),
    "field more": edit(lambda b: b.update(more=1)),
    "layers a number": edit(lambda b: b.update(layers=7)),
    "layers text": edit(lambda b: b.update(layers="abc")),
    "source a list": edit(lambda b: b.update(source=[])),
    "layout true": edit(lambda b: b.update(layout=True)),
    "layer short": edit(lambda b: b["layers"][0].pop()),
    "key a list": edit(lambda b: b["layers"][0].__setitem__(0, [])),
    "key twice": edit(lambda b: b["layers"][1].__setitem__(0, "embed")),
    "offset in the header": edit(lambda b: b["layers"][0].__setitem__(1, 0)),
    "offset unaligned": edit(lambda b: b["layers"][0].__setitem__(1, 4097)),
    "offset negative": edit(lambda b: b["layers"][0].__setitem__(1, -4096)),
    "offset past the end": edit(lambda b: b["layers"][4].__setitem__(1, 4096 << 20)),
    "offset a float": edit(lambda b: b["layers"][0].__setitem__(1, 4096.0)),
    "layers overlap": edit(lambda b: b["layers"][2].__setitem__(1, b["layers"][1][1])),
    "unknown type": edit(lambda b: b["layers"][0][4][0].__setitem__(1, "Q9_9")),
    "tensor too long": edit(lambda b: b["layers"][0][4][0].__setitem__(5, 5000)),
    "tensor unaligned": edit(lambda b: b["layers"][0][4][0].__setitem__(4, 7)),
    "tensors overlap": edit(lambda b: b["layers"][1][4][1].__setitem__(4, 0)),
    "tensor twice": edit(lambda b: b["layers"][1][4][1].__setitem__(0, "attn_q")),
    "deep": seal(b"[" * 100000),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_file_that_isnt_what_was_planned_is_packed_again(tmp_path: Path, case: str) -> None:
    w = PackWriter(tmp_path, plan())
    w.path.write_bytes(HOSTILE[case])
    assert w.finished() is None
    check_content(w.write(fill))


def test_a_sound_file_is_taken_and_a_short_one_is_not(tmp_path: Path) -> None:
    w = PackWriter(tmp_path, plan())
    w.path.write_bytes(edit(lambda b: None))
    assert w.finished() is not None
    with w.path.open("r+b") as f:
        f.truncate(plan().nbytes - 1)
    assert w.finished() is None
