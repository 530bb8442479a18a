"""4,000 hostile files: each opens or is refused by one HeadraceError, in no more memory than its own size and 1 MB.

Tiny valid files are damaged by a seeded mutator that knows where lengths hurt; Hypothesis builds GGUF files from
hostile parts. What opens is read to its last byte, so that a bad offset can't hide.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gguf_writer import write_gguf
from headrace.errors import HeadraceError
from headrace.formats.cursor import Strings
from headrace.formats.index import open_model, require_known
from headrace.formats.pack import MAGIC, PackWriter, plan_pack

SPARE = 1 << 20
NUMBERS = [0, 1, 2, 7, 8, 31, 32, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**48, 2**61, 2**63 - 1, 2**63,
           2**64 - 1]  # fmt: skip
VALUES: list[object] = [None, True, -1, 0, 1.5, 2**63, 10**40, "", "x", "../x.safetensors", [], {}, [[]], [0, 8], "F64",
                        float("inf"), "\ud800", ["a"] * 50, {"a": {"b": {}}}]  # fmt: skip


def gguf_seeds(folder: Path) -> list[bytes]:
    rng = np.random.default_rng(5)
    meta = {"general.architecture": "llama", "general.alignment": 32, "llama.block_count": 2, "f": 0.5, "flag": True,
            "tokens": ["<s>", "é", "", "世界", "a" * 60], "scores": rng.random(5, np.float32),
            "deep": [["x"], ["y", "z"]]}  # fmt: skip
    tensors = {
        "token_embd.weight": ("Q8_0", (5, 64), [rng.integers(0, 256, 340, np.uint8)]),
        "blk.0.attn_q.weight": ("Q4_K", (2, 256), [rng.integers(0, 256, 288, np.uint8)]),
        "norm": ("F32", (3,), [bytes(12)]),
    }
    write_gguf(folder / "a.gguf", meta, tensors)
    write_gguf(folder / "b.gguf", {"split.no": np.uint16(0), "split.count": np.uint16(1)}, {})
    found = [(folder / name).read_bytes() for name in ("a.gguf", "b.gguf")]
    return [*found, found[0][:4] + struct.pack("<I", 2) + found[0][8:]]


def damage(rng: random.Random, raw: bytes) -> bytes:
    """One to six wounds of the kinds that happen or are made: bits, numbers, cuts, copies, insertions."""
    b = bytearray(raw)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 6])):
        at = rng.randrange(len(b) + 1)
        kind = rng.randrange(7)
        if kind == 0 and at < len(b):
            b[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(b):
            b[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, ord("{"), ord('"'), ord("9")])
        elif kind == 2:
            number = rng.choice([*NUMBERS, len(b), len(b) - 1, len(b) - at])
            form = rng.choice(["<Q", "<Q", "<I", "<H"])
            packed = struct.pack(form, number % 256 ** struct.calcsize(form))
            b[at : at + len(packed)] = packed
        elif kind == 3:
            del b[at : at + rng.choice([1, 2, 8, 40, 10**6])]
        elif kind == 4:
            b[at:at] = rng.randbytes(rng.choice([1, 4, 8, 100]))
        elif kind == 5:
            other = rng.randrange(len(b) + 1)
            b[at:at] = b[other : other + rng.choice([1, 8, 30, 100])]
        else:
            other, size = rng.randrange(len(b) + 1), rng.choice([4, 8, 16])
            b[at : at + size] = b[other : other + size]
    return bytes(b)


def twist(rng: random.Random, value: object) -> object:
    """JSON with one value, somewhere, replaced, removed or put under another name."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        changed = dict(value)
        act = rng.random()
        if act < 0.12:
            del changed[key]
        elif act < 0.24:
            changed[rng.choice(["", "x", "é" * 30, key + "/"])] = changed.pop(key)
        else:
            changed[key] = twist(rng, value[key])
        return changed
    if isinstance(value, list) and value and rng.random() < 0.85:
        changed_list = list(value)
        i = rng.randrange(len(value))
        if rng.random() < 0.2:
            changed_list.insert(i, value[i])
        else:
            changed_list[i] = twist(rng, value[i])
        return changed_list
    if isinstance(value, int) and rng.random() < 0.5:
        return rng.choice([value + 1, value - 1, -value, value * 2, value + 64, value + 4096, *NUMBERS])
    return rng.choice(VALUES)


@contextlib.contextmanager
def bounded(size: int, what: object) -> Iterator[None]:
    """At most ``size`` and 1 MB allocated inside at any moment."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= size + SPARE, f"{peak} bytes allocated for a file of {size}: {what}"


def survive(path: Path, size: int, seen: dict[str, int]) -> None:
    """Open, then read everything: a HeadraceError with one line, or success."""
    try:
        with bounded(size, path), open_model(path) as m:
            for t in m.tensors.values():
                assert t.offset + t.nbytes <= t.path.stat().st_size
            m.digest()
        with bounded(size, path), open_model(path) as m:
            require_known(m)
            for t in m.tensors.values():
                assert m.read(t).nbytes == t.nbytes
            for value in m.metadata.values():
                assert not isinstance(value, Strings) or all(isinstance(s, str) for s in value)
        seen["opened"] += 1
    except HeadraceError as e:
        one_line(e)
        seen["refused"] += 1


def one_line(e: HeadraceError) -> None:
    message = str(e)
    assert "\n" not in message and message.endswith(".") and message.isprintable() and len(message) < 700


def both_happened(seen: dict[str, int]) -> None:
    assert seen["opened"] and seen["refused"] > seen["opened"] / 4, seen


def hostile_gguf(folder: Path, count: int, seed: int) -> None:
    rng, seen = random.Random(seed), {"opened": 0, "refused": 0}
    seeds = gguf_seeds(folder)
    path = folder / "m.gguf"
    for _ in range(count):
        raw = damage(rng, rng.choice(seeds))
        path.write_bytes(raw)
        survive(path, len(raw), seen)
    both_happened(seen)


def hostile_safetensors(folder: Path, count: int, seed: int) -> None:
    rng, seen = random.Random(seed), {"opened": 0, "refused": 0}
    (folder / "config.json").write_text('{"model_type": "llama"}')
    header = {"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
              "b": {"dtype": "BF16", "shape": [8], "data_offsets": [32, 48]}}  # fmt: skip
    for _ in range(count):
        if rng.random() < 0.5:
            text = json.dumps(twist(rng, header)).encode()
            raw = struct.pack("<Q", len(text)) + text + bytes(48)
        else:
            text = json.dumps(header).encode()
            raw = damage(rng, struct.pack("<Q", len(text)) + text + bytes(48))
        (folder / "model.safetensors").write_bytes(raw)
        survive(folder, len(raw), seen)
    both_happened(seen)


def hostile_json(folder: Path, count: int, seed: int) -> None:
    """config.json, index and tokenizer_config.json of a sharded folder, one damaged at a time."""
    rng, seen = random.Random(seed), {"opened": 0, "refused": 0}
    text = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (folder / "model-1.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    files = {
        "config.json": {"model_type": "llama", "rope_scaling": {"factor": 8.0}, "eos_token_id": [1, 2]},
        "tokenizer_config.json": {"chat_template": "{{ m }}", "added_tokens_decoder": {"0": {"content": "<s>"}}},
        "model.safetensors.index.json": {"metadata": {"total_size": 8}, "weight_map": {"a": "model-1.safetensors"}},
    }
    for _ in range(count):
        broken = rng.choice(list(files))
        for name, value in files.items():
            raw = json.dumps(value).encode()
            if name == broken:
                raw = damage(rng, raw) if rng.random() < 0.5 else json.dumps(twist(rng, value)).encode()
            (folder / name).write_bytes(raw)
        survive(folder, sum(p.stat().st_size for p in folder.iterdir()), seen)
        survive(folder / "config.json", (folder / "config.json").stat().st_size, seen)
    both_happened(seen)


def hostile_pack(folder: Path, count: int, seed: int) -> None:
    """A packed file is ours: one that isn't to the byte what its plan says is passed over, and never believed."""
    rng, seen = random.Random(seed), {"opened": 0, "refused": 0}
    layers = {"embed": [("e", "Q8_0", 4, 32, 136)], "block.0": [("q", "F32", 2, 2, 16), ("k", "F32", 2, 2, 16)]}
    writer = PackWriter(folder, plan_pack("s", "cpu", 1, layers))
    whole = writer.write(lambda layer, t, out: out.fill(7)).path.read_bytes()
    length = struct.unpack_from("<I", whole, 8)[0]
    header = json.loads(whole[32 : 32 + length])
    for i in range(count):
        if i % 10 == 0:  # damage to the weights is found when they are packed, not each time they are opened
            at = rng.randrange(4096, len(whole))
            raw = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        elif rng.random() < 0.3:
            raw = damage(rng, whole[:300]) + whole[300:]
        else:  # sealed again, so that the checksum doesn't keep the rest of the checks from their work
            body = json.dumps(header).encode()
            body = damage(rng, body) if rng.random() < 0.3 else json.dumps(twist(rng, header)).encode()
            seal = hashlib.blake2b(body, digest_size=16).digest()
            raw = struct.pack("<8sII", MAGIC, len(body), 0) + seal + body
            raw += bytes(max(0, 4096 - len(raw))) + whole[4096:]
        writer.path.write_bytes(raw)
        with bounded(len(raw), writer.path):
            opened = writer.finished()
        assert opened is None or opened.layers == writer.plan.layers
        seen["refused" if opened is None else "opened"] += 1
    both_happened(seen)


KINDS: list[tuple[Callable[[Path, int, int], None], int]] = [
    (hostile_gguf, 1600), (hostile_safetensors, 900), (hostile_json, 500), (hostile_pack, 800),
]  # fmt: skip


@pytest.mark.parametrize("kind", [k for k, _ in KINDS])
def test_some_hostile_files(tmp_path: Path, kind: Callable[[Path, int, int], None]) -> None:
    kind(tmp_path, 100, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), KINDS)
def test_hostile_files(tmp_path: Path, kind: Callable[[Path, int, int], None], count: int) -> None:
    kind(tmp_path, count, 2)


number = st.one_of(st.sampled_from(NUMBERS), st.integers(0, 100))
short = st.one_of(st.binary(max_size=12), st.sampled_from([b"general.alignment", b"split.count", b"k", b"\xff"]))


@st.composite
def text(draw: st.DrawFn) -> bytes:
    raw = draw(short)
    size = len(raw) if draw(st.integers(0, 7)) else draw(number)
    return struct.pack("<Q", size) + raw


@st.composite
def value(draw: st.DrawFn, depth: int = 0) -> bytes:
    """A value type and a value, mostly of that type."""
    kind = draw(st.integers(0, 13))
    if kind == 8:
        return struct.pack("<I", kind) + draw(text())
    if kind != 9:
        return struct.pack("<I", kind) + draw(st.binary(min_size=1, max_size=8))
    items = draw(st.lists(text() if depth == 3 else st.one_of(text(), value(depth + 1)), max_size=3))
    count = len(items) if draw(st.integers(0, 5)) else draw(number)
    return struct.pack("<IIQ", 9, draw(st.sampled_from([4, 7, 8, 8, 8, 9, 10, 12])), count) + b"".join(items)


@st.composite
def gguf_file(draw: st.DrawFn) -> bytes:
    pairs = draw(st.lists(st.tuples(text(), value()), max_size=4))
    entries = []
    for _ in range(draw(st.integers(0, 3))):
        dims = draw(st.lists(st.one_of(st.sampled_from([1, 8, 32, 256]), number), max_size=5))
        kind, offset = draw(st.sampled_from([0, 1, 2, 8, 12, 17, 30, 99])), draw(st.sampled_from([0, 32, 64, 2**63, 5]))
        entries.append(draw(text()) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset))
    n_tensors = len(entries) if draw(st.integers(0, 9)) else draw(number)
    head = b"GGUF" + struct.pack("<IQQ", draw(st.sampled_from([3, 3, 3, 2])), n_tensors, len(pairs))
    head += b"".join(k + v for k, v in pairs) + b"".join(entries)
    return head + bytes(-len(head) % 32) + bytes(draw(st.integers(0, 600)))


def built(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "built.gguf"
    path.write_bytes(raw)
    survive(path, len(raw), {"opened": 0, "refused": 0})


RELAXED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=RELAXED, database=None)
@given(raw=gguf_file())
def test_some_built_gguf_files(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    built(tmp_path_factory, raw)


@pytest.mark.slow
@settings(max_examples=500, deadline=None, suppress_health_check=RELAXED, database=None)
@given(raw=gguf_file())
def test_built_gguf_files(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    built(tmp_path_factory, raw)


def many(n: int, item: bytes) -> bytes:
    return (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, n) + item * n
    )


@pytest.mark.parametrize("item", [b"", b"ab", "🙂".encode(), b"a" * 300, b"a" * 100_000 + "🙂".encode()])
def test_big_files_take_no_more_than_themselves(tmp_path: Path, item: bytes) -> None:
    """Megabytes of the cheapest entries: what a list of Python strings would blow up six times."""
    raw = many(1_000_000 // (8 + len(item)), struct.pack("<Q", len(item)) + item)
    (tmp_path / "m.gguf").write_bytes(raw)
    with bounded(len(raw), item):
        m = open_model(tmp_path / "m.gguf")
    found = m.metadata["k"]
    assert isinstance(found, Strings) and len(found) == 1_000_000 // (8 + len(item)) and found[-1] == item.decode()
