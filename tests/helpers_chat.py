"""A tiny model with a tokenizer and a chat template, and batch files for it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gguf_writer import write_gguf
from headrace.engine import Engine
from headrace.formats.index import open_model
from headrace.jobs.batch import Batch
from headrace.text.bpe import byte_alphabet
from helpers_tiny import VOCAB, tiny_model

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END = 256 + SPECIAL.index("<|im_end|>")
LETTERS = {str(b): 100 for b in b"abcdefghijklmnopqrstuvwxyz"}
"""A bias that lets a model of random weights write letters only."""
SMALL = {"context": 128, "threads": 1, "rows": 16, "caches": 8, "sequences": 8}
TEMPLATE = (
    "{% for m in messages %}{% if m['content'] == 'refuse me' %}{{ raise_exception('not that') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat_tokens() -> dict[str, object]:
    """A byte-level vocabulary of VOCAB ids: every byte (id = byte), ChatML's control tokens, words nobody can write."""
    alphabet = byte_alphabet()
    fill = [f"\ue000{i}" for i in range(VOCAB - 256 - len(SPECIAL))]
    types = [1] * 256 + [3] * len(SPECIAL) + [1] * len(fill)
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.chat_template": TEMPLATE,
        "tokenizer.ggml.tokens": [*(alphabet[b] for b in range(256)), *SPECIAL, *fill],
        "tokenizer.ggml.token_type": np.array(types, np.int32), "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 256, "tokenizer.ggml.eot_token_id": END, "general.name": "tiny",
    }  # fmt: skip


def chat_model(path: Path, **settings: Any) -> Path:
    """``tiny_model`` with these tokens."""
    bare = tiny_model(path.with_name(f"bare-{path.name}"), **settings)
    with open_model(bare) as file:
        tensors = {t.name: (t.fmt, t.shape, [file.read(t)]) for t in file.tensors.values()}
        write_gguf(path, {**file.metadata, **chat_tokens()}, tensors, file.types)
    bare.unlink()
    return path


def row(custom_id: object, body: Mapping[str, Any], url: str = "/v1/completions", **more: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": dict(body), **more}


def chat(custom_id: str, text: str, **body: Any) -> dict[str, Any]:
    return row(custom_id, {"messages": [{"role": "user", "content": text}], **body}, "/v1/chat/completions")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any] | str | bytes]) -> Path:
    """Rows as JSON, or lines as they are."""
    lines = [r if isinstance(r, bytes) else (r if isinstance(r, str) else json.dumps(r)).encode() for r in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def mixed(count: int) -> list[dict[str, Any]]:
    """Rows of many kinds, short ones and long ones."""
    rows = []
    for i in range(count):
        body = {"max_tokens": 1 + i % 9, "temperature": 0 if i % 4 == 0 else 1.0, "logit_bias": LETTERS}
        if i % 5 == 1:
            body |= {"n": 2}
        if i % 7 == 2:
            body |= {"seed": i, "presence_penalty": 0.5}
        rows.append(
            chat(f"c{i}", f"question {i}" * (i % 3 + 1), **body)
            if i % 2
            else row(f"t{i}", {"prompt": f"once {i}", **body})
        )
    return rows


def compute(engine: Engine, folder: Path, rows: list[Any], seed: int = 0, **settings: Any) -> list[dict[str, Any]]:
    out = folder / "out.jsonl"
    report = Batch(engine, write_rows(folder / "in.jsonl", rows), out, seed, **settings).run()
    assert (report.rows, report.total) == (len(rows), len(rows)) and not out.with_name("out.jsonl.state").exists()
    found = read_rows(out)
    assert len(found) == len(rows) and report.failed == sum(f["error"] is not None for f in found)
    assert len({f["id"] for f in found}) == len(found)
    return found
