"""A Hugging Face model folder: configuration, tokeniser files, and safetensors in one file or in shards."""

from __future__ import annotations

import re
from pathlib import Path

from headrace.errors import BadFile, Unsupported
from headrace.formats.files import cannot_read
from headrace.formats.safetensors import read_json, read_safetensors
from headrace.formats.tensor import TensorInfo, show

MAX_CONFIG = 4 << 20
MAX_TOKENIZER = 64 << 20
MAX_SHARDS = 4096

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HERE = re.compile(r"[^/\\:\0]*\.safetensors", re.DOTALL)
"""A file of this very folder: no separator, drive or NUL that leads out of it."""
OBJECTS = {"generation_config": MAX_CONFIG, "tokenizer_config": MAX_TOKENIZER, "special_tokens_map": MAX_CONFIG}
"""Key in the metadata, and of the file with ``.json`` behind it -> most bytes."""
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja",
         "chat_template.json")  # fmt: skip


def read_config(path: Path) -> dict[str, object]:
    """A bare config.json -> {"config": {...}}."""
    return {"config": read_object(path, MAX_CONFIG, "configuration")}


def read_folder(folder: Path) -> tuple[dict[str, object], list[TensorInfo], list[Path]]:
    """(metadata, tensors, weight files) of a folder.

    Metadata: "config", and where the folder has them the keys of ``OBJECTS`` as parsed JSON objects, and "files":
    file name -> path for ``FILES``, unread.
    """
    metadata = read_config(folder / "config.json")
    for key, most in OBJECTS.items():
        if (path := folder / f"{key}.json").exists():
            metadata[key] = read_object(path, most, path.name)
    metadata["files"] = {name: folder / name for name in FILES if (folder / name).is_file()}
    paths, claimed = _weight_files(folder)
    tensors: list[TensorInfo] = []
    seen: dict[str, Path] = {}
    for path in paths:
        for t in read_safetensors(path):
            if t.name in seen:
                both = f"{seen[t.name].name} and {path.name}"
                raise BadFile(f"{folder}: tensor {show(t.name)} is both in {both}; download the folder again.")
            seen[t.name] = path
            tensors.append(t)
    for name, path in claimed.items():
        if seen.get(name) != path:
            raise BadFile(f"{path}: lacks the tensor {show(name)} that {INDEX} places there; download it again.")
    return metadata, tensors, paths


def read_object(path: Path, most: int, what: str) -> dict[str, object]:
    """A JSON file that holds an object; BadFile for anything else."""
    value = read_json(path, most, what)
    if not isinstance(value, dict):
        raise BadFile(f"{path}: the {what} isn't a JSON object; download it again.")
    return value


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """(files to read, where the index places each tensor)."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE], {}
    if (folder / INDEX).exists():
        return _sharded(folder)
    names = listing(folder)
    if "adapter_config.json" in names:
        raise Unsupported(
            f"{folder}: is an adapter (LoRA) without its base model, which Headrace doesn't read; "
            "merge it into the base model and give that folder."
        )
    loose = [n for n in names if n.endswith(".safetensors")]
    if loose:
        raise BadFile(f"{folder}: has {loose[0]} but neither {SINGLE} nor {INDEX}; download the missing files.")
    pickled = [n for n in names if n.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickled:
        raise Unsupported(
            f"{folder}: its weights are pickles ({pickled[0]}), which can run code when read; "
            "convert them to safetensors (transformers: save_pretrained) or use a GGUF file."
        )
    raise BadFile(
        f"{folder}: has a config.json but no weights; download {SINGLE}, "
        "or give the path of config.json itself to plan without weights."
    )


def _sharded(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    index = folder / INDEX
    weights = read_object(index, MAX_TOKENIZER, "index of shards").get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise BadFile(f"{index}: has no weight_map; download it again.")
    paths: dict[str, Path] = {}
    for name, shard in weights.items():
        if not isinstance(shard, str) or not HERE.fullmatch(shard):
            there = show(str(shard)[:200])
            raise BadFile(f"{index}: places {show(name)} in {there}, no safetensors file beside it; download it again.")
        paths.setdefault(shard, folder / shard)
        if len(paths) > MAX_SHARDS:
            raise BadFile(f"{index}: names more than {MAX_SHARDS} files; download it again.")
    return sorted(paths.values()), {name: paths[shard] for name, shard in weights.items()}


def listing(folder: Path) -> list[str]:
    """The folder's file names, sorted."""
    try:
        return sorted(p.name for p in folder.iterdir())
    except OSError as e:
        raise cannot_read(folder, "folder", e) from None
