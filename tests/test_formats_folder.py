"""safetensors and Hugging Face folders: what the reference libraries write is read, damage is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headrace.errors import BadFile, HeadraceError, Unsupported
from headrace.formats.index import open_model, require_known

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8}


def folder(tmp_path: Path, config: object = CONFIG) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def st(header: object, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def tensor(dtype: object = "F32", shape: object = (2,), ends: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": ends}


def test_single_file(tmp_path: Path) -> None:
    weights = {"a.weight": torch.randn(6, 8), "b": torch.randn(4).to(torch.bfloat16), "c": torch.randn(2, 3, 4).half(),
               "s": torch.tensor(3.0), "ids": torch.arange(5)}  # fmt: skip
    save_file(weights, folder(tmp_path) / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ x }}"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    with open_model(tmp_path) as m:
        assert m.kind == "hf" and m.metadata["config"] == CONFIG
        assert m.metadata["generation_config"] == {"eos_token_id": [1, 2]}
        assert m.metadata["tokenizer_config"] == {"chat_template": "{{ x }}"}
        assert m.metadata["files"] == {"tokenizer.json": tmp_path / "tokenizer.json"}
        assert {n: (t.fmt, t.shape) for n, t in m.tensors.items()} == {
            "a.weight": ("F32", (6, 8)), "b": ("BF16", (4,)), "c": ("F16", (2, 3, 4)), "s": ("F32", ()),
            "ids": ("I64", (5,)),
        }  # fmt: skip
        for name, w in weights.items():
            raw = w.reshape(-1).view(torch.uint8).numpy() if w.dim() else w.reshape(1).view(torch.uint8).numpy()
            np.testing.assert_array_equal(m.read(m.tensors[name]), raw)
        require_known(m, ["a.weight", "b", "c", "s"])
        with pytest.raises(Unsupported, match="'ids' has the type I64"):
            require_known(m)


def shards(tmp_path: Path) -> Path:
    folder(tmp_path)
    save_file({"a": torch.full((8,), 1.0)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.full((8,), 2.0)}, tmp_path / "model-00002-of-00002.safetensors")
    index(tmp_path, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    return tmp_path


def index(tmp_path: Path, weight_map: object) -> None:
    body = {"metadata": {"total_size": 64}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(body))


def test_shards(tmp_path: Path) -> None:
    with open_model(shards(tmp_path)) as m:
        assert [m.read(m.tensors[n]).view(np.float32)[0] for n in "ab"] == [1.0, 2.0]
        assert [p.name for p in m.paths] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.mark.parametrize(
    ("weight_map", "what"),
    [
        ({"a": "model-00001-of-00002.safetensors", "b": "model-00003.safetensors"}, "no such model file"),
        ({"a": "../model.safetensors"}, "no safetensors file beside it"),
        ({"a": "/etc/x.safetensors"}, "no safetensors file beside it"),
        ({"a": "C:\\x.safetensors"}, "no safetensors file beside it"),
        ({"a": "x\0.safetensors"}, "no safetensors file beside it"),
        ({"a": "pytorch_model.bin"}, "no safetensors file beside it"),
        ({"a": 3}, "no safetensors file beside it"),
        ({"z": "model-00001-of-00002.safetensors"}, "lacks the tensor 'z'"),
        ({"a": "model-00002-of-00002.safetensors"}, "lacks the tensor 'a'"),
        ({}, "has no weight_map"),
        ([1], "has no weight_map"),
        ({f"t{i}": f"{i}.safetensors" for i in range(5000)}, "more than 4096 files"),
    ],
)
def test_bad_index(tmp_path: Path, weight_map: object, what: str) -> None:
    index(shards(tmp_path), weight_map)
    with pytest.raises(BadFile, match=what):
        open_model(tmp_path)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(8), "b": torch.zeros(8)}, shards(tmp_path) / "model-00002-of-00002.safetensors")
    with pytest.raises(BadFile, match="'a' is both in"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    ("names", "error", "what"),
    [
        ([], BadFile, "no weights"),
        (["pytorch_model.bin"], Unsupported, "pickles"),
        (["consolidated.00.pth"], Unsupported, "pickles"),
        (["adapter_config.json", "adapter_model.safetensors"], Unsupported, "LoRA"),
        (["model-00001-of-00002.safetensors"], BadFile, "neither model.safetensors nor"),
    ],
)
def test_folders_without_usable_weights(tmp_path: Path, names: list[str], error: type[Exception], what: str) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(error, match=what):
        open_model(folder(tmp_path))


def test_bare_configuration(tmp_path: Path) -> None:
    m = open_model(folder(tmp_path) / "config.json")
    assert m.kind == "hf" and m.metadata["config"] == CONFIG and not m.tensors and not m.paths


CONFIGS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "isn't JSON"),
    "a list": (b"[1]", "isn't a JSON object"),
    "cut": (b'{"a": ', "isn't JSON"),
    "web page": (b"<html>", "isn't JSON"),
    "not UTF-8": (b'{"a": "\xff"}', "isn't UTF-8"),
    "twice": (b'{"a": 1, "a": 2}', "key 'a' twice"),
    "deep": (b"[" * 100_000, "nested too deep"),
    "long number": (b'{"a": ' + b"9" * 10_000 + b"}", "isn't JSON"),
    "huge": (b" " * (5 << 20), "over 4 MiB"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_bad_configuration(tmp_path: Path, case: str) -> None:
    raw, what = CONFIGS[case]
    (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(BadFile, match=what):
        open_model(tmp_path / "config.json")


HEADERS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "only 0 bytes"),
    "short": (b"\0\0\0", "only 3 bytes"),
    "length": (struct.pack("<Q", 2**63) + b"{}" * 20, "claims a header of"),
    "length over the file": (struct.pack("<Q", 60) + b"{}" * 20, "claims a header of"),
    "web page": (b"<!DOCTYPE html><html></html>", "web page"),
    "not JSON": (st(b"{abc}"), "isn't JSON"),
    "a list": (st([]), "isn't a JSON object"),
    "brackets": (st(b"[" + b"[]," * 5000 + b"[]]"), "too many tensors"),
    "deep": (st(b"[" * 1000 + b"]" * 1000), "nested too deep"),
    "twice": (st(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],'
                 b'"data_offsets":[0,1]}}', b"x"), "key 'a' twice"),
    "entry": (st({"a": 5}), "isn't described"),
    "entry fields": (st({"a": {"dtype": "F32"}}), "isn't described"),
    "dtype": (st({"a": tensor(dtype=5)}, bytes(8)), "no name or dtype"),
    "name": (st({"": tensor()}, bytes(8)), "no name or dtype"),
    "shape text": (st({"a": tensor(shape="22")}, bytes(8)), "impossible shape"),
    "shape negative": (st({"a": tensor(shape=[-2])}, bytes(8)), "impossible shape"),
    "shape boolean": (st({"a": tensor(shape=[True, 2])}, bytes(8)), "impossible shape"),
    "shape float": (st({"a": tensor(shape=[2.0])}, bytes(8)), "impossible shape"),
    "shape huge": (st({"a": tensor(shape=[10**30])}, bytes(8)), "impossible shape"),
    "shape long": (st({"a": tensor(shape=[1] * 100)}, bytes(8)), "impossible shape"),
    "offsets backwards": (st({"a": tensor(ends=[8, 0])}, bytes(8)), "outside the data"),
    "offsets past the end": (st({"a": tensor(ends=[0, 16])}, bytes(8)), "outside the data"),
    "offsets one": (st({"a": tensor(ends=[8])}, bytes(8)), "outside the data"),
    "size": (st({"a": tensor(shape=[3])}, bytes(8)), "8 bytes where F32"),
    "overlap": (st({"a": tensor(), "b": tensor(ends=[4, 12])}, bytes(12)), "overlap"),
    "hole": (st({"a": tensor(ends=[8, 16])}, bytes(16)), "take 8 bytes but it holds 16"),
    "data cut": (st({"a": tensor()}, bytes(7)), "outside the data"),
    "data over": (st({"a": tensor()}, bytes(9)), "take 8 bytes but it holds 9"),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADERS)
def test_bad_safetensors(tmp_path: Path, case: str) -> None:
    raw, what = HEADERS[case]
    path = folder(tmp_path) / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(BadFile) as e:
        open_model(tmp_path)
    message = str(e.value)
    assert what in message and message.startswith(str(path)) and len(message) < 400 + len(str(path))


def test_unknown_dtype_is_refused_when_needed(tmp_path: Path) -> None:
    path = folder(tmp_path) / "model.safetensors"
    path.write_bytes(st({"a": tensor("F8_E4M3", [8]), "b": tensor("Q77", [2], [8, 16])}, bytes(16)))
    m = open_model(tmp_path)
    for name, kind in [("a", "F8_E4M3"), ("b", "type 'Q77'")]:
        with pytest.raises(Unsupported, match=f"'{name}' has the type {kind}"):
            require_known(m, [name])


def test_an_empty_tensor_is_a_tensor(tmp_path: Path) -> None:
    (folder(tmp_path) / "model.safetensors").write_bytes(
        st({"a": tensor(shape=[3, 0], ends=[0, 0]), "b": tensor()}, bytes(8))
    )
    m = open_model(tmp_path)
    assert m.read(m.tensors["a"]).size == 0 and m.tensors["a"].shape == (3, 0) and m.read(m.tensors["b"]).size == 8


def test_weights_without_their_folder(tmp_path: Path) -> None:
    path = folder(tmp_path) / "model.safetensors"
    path.write_bytes(st({"a": tensor()}, bytes(8)))
    with pytest.raises(BadFile, match="give the folder"):
        open_model(path)
    assert list(open_model(tmp_path).tensors) == ["a"]
    with pytest.raises(BadFile, match="give the folder"):
        open_model(tmp_path / "model.safetensors.index.json")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path) / "model.safetensors"
    whole: Any = st({"a": tensor(), "b": tensor(ends=[8, 16])}, bytes(16))
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(HeadraceError):
            open_model(tmp_path)
