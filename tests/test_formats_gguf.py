"""GGUF: values, shapes and bytes equal the gguf package's; each kind of damage is one clear error."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_writer import write_gguf
from headrace.errors import BadFile, HeadraceError, Unsupported
from headrace.formats.cursor import Strings
from headrace.formats.gguf import read_gguf
from headrace.formats.index import open_model, require_known
from headrace.formats.quant import quantise

RNG = np.random.default_rng(11)


def text(s: bytes) -> bytes:
    return struct.pack("<Q", len(s)) + s


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def entry(name: bytes, dims: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def build(
    pairs: list[bytes], entries: list[bytes], data: bytes = b"", version: int = 3, counts: tuple[int, int] | None = None
) -> bytes:
    n_tensors, n_pairs = counts or (len(entries), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_pairs) + b"".join(pairs) + b"".join(entries)
    return head + bytes(-len(head) % 32) + data


def opened(tmp_path: Path, raw: bytes, name: str = "m.gguf") -> Path:
    path = tmp_path / name
    path.write_bytes(raw)
    return path


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    w = gguf.GGUFWriter(path, "llama")
    w.add_uint8("a.u8", 200)
    w.add_int8("a.i8", -5)
    w.add_uint16("a.u16", 60000)
    w.add_int16("a.i16", -300)
    w.add_uint32("a.u32", 4_000_000_000)
    w.add_int32("a.i32", -7)
    w.add_uint64("a.u64", 2**63 + 1)
    w.add_int64("a.i64", -(2**40))
    w.add_float32("a.f32", 0.25)
    w.add_float64("a.f64", 0.1)
    w.add_bool("a.bool", True)
    w.add_string("a.str", "Grüße, 世界")
    tokens = ["", "a", "é", "世界", "x" * 1000, "", "▁the", "🙂"] * 5000
    w.add_array("a.tokens", tokens)
    w.add_array("a.ints", [1, -2, 3])
    w.add_array("a.floats", [0.5, -1.5])
    w.add_array("a.bools", [True, False])
    x, y = RNG.standard_normal((6, 64)).astype(np.float32), RNG.standard_normal((2, 3, 32)).astype(np.float16)
    w.add_tensor("x.weight", x)
    w.add_tensor("y", y)
    w.add_tensor("q", gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()

    with open_model(path) as m:
        expected = {"a.u8": 200, "a.i8": -5, "a.u16": 60000, "a.i16": -300, "a.u32": 4_000_000_000, "a.i32": -7,
                    "a.u64": 2**63 + 1, "a.i64": -(2**40), "a.f32": 0.25, "a.f64": 0.1, "a.bool": True,
                    "a.str": "Grüße, 世界", "general.architecture": "llama"}  # fmt: skip
        assert {k: m.metadata[k] for k in expected} == expected
        assert all(m.types[k] == k[2:] for k in expected if k.startswith("a."))
        found = m.metadata["a.tokens"]
        assert isinstance(found, Strings) and list(found) == tokens == [found[i] for i in range(len(found))]
        assert found[-1] == "🙂" and found[2:4] == ["é", "世界"] and found == tokens
        np.testing.assert_array_equal(m.metadata["a.ints"], [1, -2, 3])
        np.testing.assert_array_equal(m.metadata["a.floats"], np.float32([0.5, -1.5]))
        assert m.metadata["a.bools"].dtype == np.bool_ and m.metadata["a.bools"].tolist() == [True, False]

        t = m.tensors["x.weight"]
        assert (t.fmt, t.shape, t.n, t.k, t.nbytes) == ("F32", (6, 64), 6, 64, x.nbytes)
        np.testing.assert_array_equal(m.read(t), x.reshape(-1).view(np.uint8))
        assert m.tensors["y"].shape == (2, 3, 32) and m.tensors["y"].n == 6
        np.testing.assert_array_equal(m.read(m.tensors["y"]).view(np.float16).reshape(y.shape), y)
        assert m.tensors["q"].fmt == "Q8_0"
        np.testing.assert_array_equal(m.read(m.tensors["q"]).reshape(6, -1), quantise("Q8_0", x))
        require_known(m)


def test_rows_in_any_order(tmp_path: Path) -> None:
    x = np.arange(40 * 8, dtype=np.float32).reshape(40, 8)
    write_gguf(tmp_path / "m.gguf", {}, {"x": ("F32", x.shape, [x.view(np.uint8)])})
    with open_model(tmp_path / "m.gguf") as m:
        t = m.tensors["x"]
        for rows in [slice(None), slice(3, 9), slice(30, 90), slice(5, 5), slice(None, None, -7), slice(-4, None),
                     np.array([], np.int64), np.array([7]), np.array([3, 4, 5, 0, 39, 38, 1, 2], np.int32),
                     np.array([1, 1, 2], np.uint32)]:  # fmt: skip
            np.testing.assert_array_equal(m.read(t, rows).view(np.float32).reshape(-1, 8), x[rows])
        out = np.zeros((2, 32), np.uint8)
        m.read_into(t, out, slice(10, 12))
        np.testing.assert_array_equal(out.view(np.float32), x[10:12])
        for bad in [np.array([40]), np.array([-1])]:
            with pytest.raises(IndexError):
                m.read(t, bad)
        with pytest.raises(ValueError, match="bytes given"):
            m.read_into(t, np.zeros(31, np.uint8), slice(0, 1))
        with pytest.raises(ValueError, match="bytes given"):
            m.read_into(t, np.zeros((2, 64), np.uint8)[:, ::2], slice(0, 2))


def test_writer_and_reader_agree(tmp_path: Path) -> None:
    metadata = {"general.architecture": "llama", "i": 3, "neg": -3, "big": 2**40, "f": 0.5, "flag": False,
                "tokens": ["a", "", "é"], "list": ["x", "y"], "ints": [1, 2], "floats": [0.5, 1],
                "bools": [True, False], "scores": np.array([1.5], np.float32), "small": np.uint16(9),
                "nested": [["a"], ["b", "c"]]}  # fmt: skip
    chunks = [bytes(range(34)), np.arange(34, dtype=np.uint8)]
    write_gguf(tmp_path / "a.gguf", metadata, {"q": ("Q8_0", (2, 32), chunks), "f": ("F32", (3,), [bytes(12)])},
               alignment=128)  # fmt: skip
    first = read_gguf(tmp_path / "a.gguf")
    assert first.metadata["general.alignment"] == 128
    assert [t.offset % 128 for t in first.tensors] == [0, 0]
    assert first.types["small"] == "u16" and first.types["big"] == "u64" and first.types["neg"] == "i32"
    assert first.metadata["nested"] == [["a"], ["b", "c"]]
    assert list(first.metadata["tokens"]) == ["a", "", "é"]
    with open_model(tmp_path / "a.gguf") as m:
        np.testing.assert_array_equal(m.read(m.tensors["q"]), np.concatenate([np.arange(34), np.arange(34)]))
        copies = {t.name: (t.fmt, t.shape, [m.read(t)]) for t in m.tensors.values()}
        write_gguf(tmp_path / "b.gguf", m.metadata, copies, m.types, alignment=128)
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()
    names = {p.name for p in tmp_path.iterdir()}
    theirs = gguf.GGUFReader(tmp_path / "a.gguf")
    assert theirs.fields["list"].contents() == ["x", "y"]
    assert [t.name for t in theirs.tensors] == ["q", "f"]
    with pytest.raises(ValueError, match="needs 12 bytes"):
        write_gguf(tmp_path / "c.gguf", {}, {"f": ("F32", (3,), [bytes(8)])})
    with pytest.raises(ValueError, match="needs 12 bytes"):
        write_gguf(tmp_path / "c.gguf", {}, {"f": ("F32", (3,), [bytes(8), bytes(8)])})
    assert {p.name for p in tmp_path.iterdir()} == names  # a failed write leaves nothing


def test_version_2_and_vocabulary_only(tmp_path: Path) -> None:
    m = open_model(opened(tmp_path, build([pair(b"a", 4, struct.pack("<I", 5))], [], version=2)))
    assert m.metadata == {"a": 5} and not m.tensors and m.kind == "gguf"


def test_unknown_types_are_listed_and_refused_when_needed(tmp_path: Path) -> None:
    entries = [entry(b"ok", [32], 0, 0), entry(b"iq", [256], 17, 128), entry(b"new", [256], 99, 256)]
    m = open_model(opened(tmp_path, build([], entries, bytes(512))))
    assert [t.fmt for t in m.tensors.values()] == ["F32", "IQ2_XS", "type 99"]
    require_known(m, ["ok"])
    with pytest.raises(Unsupported, match=r"'iq' has the type IQ2_XS.*Q4_K"):
        require_known(m)
    with pytest.raises(Unsupported, match="'new' has the type type 99"):
        m.read(m.tensors["new"])


def one(kind: int, value: bytes) -> bytes:
    return build([pair(b"k", kind, value)], [])


def array(kind: int, count: int, body: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + body


F32_TENSOR = [entry(b"t", [8], 0, 0)]
DAMAGED = {
    "empty file": (b"", "is empty"),
    "short magic": (b"GG", "is no GGUF"),
    "web page": (b"\n<!DOCTYPE html><html>404</html>", "web page"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "Git LFS pointer"),
    "zip": (b"PK\x03\x04" + bytes(100), "pickle"),
    "old ggml": (b"tjgg" + bytes(100), "older than GGUF"),
    "only magic": (b"GGUF", "the version"),
    "version 1": (b"GGUF" + struct.pack("<III", 1, 0, 0), "version 1"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "no counts": (b"GGUF" + struct.pack("<I", 3), "tensor count"),
    "pair count": (build([], [], counts=(0, 2**62)), "claims 4611686018427387904 metadata"),
    "tensor count": (build([], [], counts=(2**64 - 1, 0)), "18446744073709551615 tensors"),
    "key length": (build([struct.pack("<Q", 2**63) + b"abcdefgh"], []), "claims 9223372036854775808 bytes"),
    "key not UTF-8": (build([pair(b"\xff\xfe", 4, bytes(4))], []), "isn't UTF-8"),
    "empty key": (build([pair(b"", 4, bytes(4))], []), "is empty"),
    "key twice": (build([pair(b"k", 4, bytes(4))] * 2, []), "'k' is there twice"),
    "value type": (one(13, bytes(8)), "unknown value type 13"),
    "array value type": (one(9, array(77, 0)), "unknown value type 77"),
    "value cut": (build([pair(b"k", 10, b"")], [])[:38], "bytes"),
    "bool 2": (one(7, b"\x02"), "neither 0 nor 1"),
    "bool array": (one(9, array(7, 2, b"\x01\x07")), "neither 0 nor 1"),
    "string value not UTF-8": (one(8, text(b"\xc3")), "isn't UTF-8"),
    "array count": (one(9, array(4, 2**61)), "claims 2305843009213693952 values"),
    "string array count": (one(9, array(8, 2**60)), "strings"),
    "string array item": (one(9, array(8, 2, text(b"a") + struct.pack("<Q", 2**40))), "string 1"),
    "string split inside a letter": (one(9, array(8, 2, text(b"a\xc3") + text(b"\xa9"))), "isn't UTF-8"),
    "string array not UTF-8": (one(9, array(8, 2, text(b"a") + text(b"\xff"))), "string 0 or one soon after it"),
    "deep nesting": (one(9, array(9, 1) * 50 + bytes(64)), "nested more than"),
    "many inner arrays": (one(9, array(9, 2**50)), "inner arrays"),
    "flood of pairs": (build([pair(b"%x" % i, 0, b"1") for i in range(5000)], []), "too many for a file of"),
    "flood of tensors": (build([], [entry(b"%x" % i, [8], 99, 0) for i in range(3000)]), "too many for a file of"),
    "flood of arrays": (one(9, array(9, 6000, array(0, 0) * 6000)), "too many for a file of"),
    "long text not UTF-8": (one(9, array(8, 1, text(b"a" * 100_000 + b"\xf0\x9f"))), "isn't UTF-8"),
    "alignment 0": (build([pair(b"general.alignment", 4, struct.pack("<I", 0))], []), "general.alignment"),
    "alignment 24": (build([pair(b"general.alignment", 4, struct.pack("<I", 24))], []), "general.alignment"),
    "alignment type": (build([pair(b"general.alignment", 10, struct.pack("<Q", 32))], []), "general.alignment"),
    "tensor twice": (build([], [entry(b"t", [8], 0, 0), entry(b"t", [8], 0, 32)], bytes(64)), "'t' is there twice"),
    "no tensor name": (build([], [entry(b"", [8], 0, 0)], bytes(32)), "no name"),
    "five dimensions": (build([], [entry(b"t", [1] * 5, 0, 0)], bytes(32)), "5 dimensions"),
    "dimension 0": (build([], [entry(b"t", [8, 0], 0, 0)], bytes(32)), "impossible shape"),
    "overflow to 32": (build([], [entry(b"t", [2**32, 2**32], 0, 0)], bytes(32)), "but the file has"),
    "dimension over 2^48": (build([], [entry(b"t", [2**63], 0, 0)], bytes(32)), "impossible shape"),
    "misaligned": (build([], [entry(b"t", [8], 0, 8)], bytes(64)), "isn't a multiple of 32"),
    "out of range": (build([], [entry(b"t", [8], 0, 32)], bytes(32)), "but the file has"),
    "offset overflow": (build([], [entry(b"t", [8], 0, 2**64 - 32)], bytes(32)), "but the file has"),
    "overlap": (build([], [entry(b"a", [16], 0, 0), entry(b"b", [8], 0, 32)], bytes(64)), "overlap"),
    "rows of half blocks": (build([], [entry(b"t", [48], 8, 0)], bytes(64)), "blocks of 32"),
    "data cut": (build([], F32_TENSOR, bytes(31)), "but the file has"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_one_clear_error(tmp_path: Path, case: str) -> None:
    raw, what = DAMAGED[case]
    path = opened(tmp_path, raw)
    with pytest.raises(HeadraceError) as e:
        open_model(path)
    message = str(e.value)
    assert what in message and message.startswith(str(path)) and message.endswith(".") and "\n" not in message
    assert len(message) < 400 + len(str(path))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    arrays = [pair(b"t", 9, array(8, 3, text(b"a") * 3)), pair(b"n", 9, array(4, 2, bytes(8)))]
    pairs = [pair(b"k", 8, text(b"hello")), *arrays]
    whole = build(pairs, F32_TENSOR, bytes(32))
    assert open_model(opened(tmp_path, whole)).tensors
    for size in range(len(whole)):
        with pytest.raises(HeadraceError):
            open_model(opened(tmp_path, whole[:size]))


def test_paths_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="no such model file"):
        open_model(tmp_path / "nothing.gguf")
    with pytest.raises(BadFile, match="no such model file"):
        open_model(opened(tmp_path, b"x") / "below" / "m.gguf")
    with pytest.raises(BadFile, match="can't be a path"):
        open_model("a\0b.gguf")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadFile, match="holds no model"):
        open_model(tmp_path / "empty")


def test_a_folder_with_one_model_is_that_model(tmp_path: Path) -> None:
    opened(tmp_path, build([], F32_TENSOR, bytes(32)), "a.gguf")
    assert list(open_model(tmp_path).tensors) == ["t"]
    opened(tmp_path, build([], F32_TENSOR, bytes(32)), "b.gguf")
    with pytest.raises(BadFile, match=r"several models \(a.gguf, b.gguf\)"):
        open_model(tmp_path)


def write_split(folder: Path, stem: str = "big", count: int = 3, total: int = 3) -> list[Path]:
    paths = []
    for i in range(count):
        meta: dict[str, object] = {"split.no": np.uint16(i), "split.count": np.uint16(count)}
        meta |= {"split.tensors.count": np.int32(total)} | ({"general.architecture": "llama"} if i == 0 else {})
        paths.append(folder / f"{stem}-{i + 1:05d}-of-{count:05d}.gguf")
        write_gguf(paths[-1], meta, {f"t{i}": ("F32", (1, 8), [np.full(8, i, np.float32).view(np.uint8)])})
    return paths


def test_split_model_from_any_part(tmp_path: Path) -> None:
    for path in [*write_split(tmp_path), tmp_path]:
        with open_model(path) as m:
            assert m.metadata["general.architecture"] == "llama" and len(m.paths) == 3
            assert [m.read(m.tensors[f"t{i}"]).view(np.float32)[0] for i in range(3)] == [0, 1, 2]


def test_split_model_with_a_fault(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    moved = tmp_path / "renamed.gguf"
    paths[1].rename(moved)
    with pytest.raises(BadFile, match=r"big-00002-of-00003\.gguf is missing"):
        open_model(paths[0])
    with pytest.raises(BadFile, match="isn't named like one"):
        open_model(moved)
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(BadFile, match=r"split\.no"):
        open_model(paths[0])
    with pytest.raises(BadFile, match=r"3 tensors where split\.tensors\.count says 4"):
        open_model(write_split(tmp_path, "other", total=4)[2])


def test_a_file_changed_while_open_is_noticed(tmp_path: Path) -> None:
    path = opened(tmp_path, build([], F32_TENSOR, bytes(32)))
    m = open_model(path)
    opened(tmp_path, build([], [entry(b"t", [16], 0, 0)], bytes(64)))
    with pytest.raises(BadFile, match="was changed"):
        m.read(m.tensors["t"])


def test_digest_names_content_and_identity_the_copy(tmp_path: Path) -> None:
    raw = build([], [entry(b"t", [4096], 0, 0)], RNG.bytes(16384))
    a, b = open_model(opened(tmp_path, raw, "a.gguf")), open_model(opened(tmp_path, raw, "b.gguf"))
    assert a.digest() == b.digest() and a.identity() != b.identity()
    changed = bytearray(raw)
    changed[-5000] ^= 1
    assert open_model(opened(tmp_path, bytes(changed), "c.gguf")).digest() != a.digest()
