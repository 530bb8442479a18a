"""The packed file: what is written is read, an interrupted packing goes on, damage and a full disk are refused."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import headrace.formats.pack as pack
from headrace.errors import BadFile, HeadraceError, OverBudget
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
        e = file.extent(layer)
        assert e.offset % 4096 == 0 and e.nbytes % 4096 == 0 and e.path == file.path
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
    seen: list[tuple[str, int, int]] = []
    file = w.write(fill, lambda *a: seen.append(a))
    assert seen == [(k, i + 1, 5) for i, k in enumerate(LAYERS)]
    check_content(file)
    file.verify()
    assert (file.plan.source, file.plan.device, file.plan.layout) == ("abc", "cpu", 1)
    assert file.path.stat().st_size == plan().nbytes
    assert [p.name for p in file.path.parent.iterdir()] == [file.path.name]
    with pytest.raises(KeyError):
        file.extent("block.9")

    def never(*a: object) -> None:
        raise AssertionError("packed twice")

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
    file.verify()
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
        f.seek(w.plan.layers["block.1"][0] + 77)
        f.write(b"?")
    file = w.write(fill)
    file.verify()
    check_content(file)


def test_two_writers_at_once(tmp_path: Path) -> None:
    w = PackWriter(tmp_path, plan())
    fd = open_shared(w.part)
    assert try_lock(fd)
    with pytest.raises(BadFile, match="another process"):
        w.write(fill)
    os.close(fd)
    check_content(w.write(fill))


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
    with pytest.raises(BadFile, match="choose another cache folder"):
        PackWriter(tmp_path / "file" / "cache", plan()).write(fill)


def test_verify_finds_a_flipped_bit(tmp_path: Path) -> None:
    file = PackWriter(tmp_path, plan()).write(fill)
    raw = bytearray(file.path.read_bytes())
    raw[file.extent("block.0").offset + 100] ^= 4
    file.path.write_bytes(raw)
    with pytest.raises(BadFile, match=r"'block\.0' is damaged"):
        PackFile(file.path).verify()


def seal(header: bytes) -> bytes:
    """A file whose header has a right checksum, whatever it says."""
    return struct.pack("<8sII", pack.MAGIC, len(header), 0) + hashlib.blake2b(header, digest_size=16).digest() + header


def edit(change: Callable[[dict], object]) -> bytes:
    body = json.loads(plan().header({}))
    change(body)
    return seal(json.dumps(body).encode()) + bytes(40000)


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
def test_hostile_headers(tmp_path: Path, case: str) -> None:
    path = tmp_path / "x.pack"
    path.write_bytes(HOSTILE[case])
    with pytest.raises(HeadraceError) as e:
        PackFile(path)
    assert str(e.value).startswith(str(path)) and len(str(e.value)) < 400 + len(str(path))


def test_an_edited_header_that_is_sound_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.pack"
    path.write_bytes(edit(lambda b: None))
    assert PackFile(path).plan.layers == plan().layers
