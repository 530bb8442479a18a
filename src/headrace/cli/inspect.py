"""``headrace inspect``: what a model is made of, from its metadata and index alone."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from headrace.cli.generation import described
from headrace.cli.show import human, table
from headrace.errors import HeadraceError
from headrace.formats.index import ModelFile, open_model
from headrace.formats.tensor import KNOWN, show
from headrace.memory.kv import PRESETS
from headrace.model.layers import Model, load_model, spec_of
from headrace.model.spec import Spec

Facts = dict[str, Any]


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Tells what a model is made of: architecture, tensors, bytes of each layer and of a token's cache, "
        "quantisation, chat template, and what might surprise. Reads the index only, so any size is quick; "
        "from a config.json alone too, so also of a model on a hub (hf:ORG/REPO) before its weights are fetched."
    )
    what = "a .gguf file, a Hugging Face folder, a config.json, or a name as -m of `headrace run` takes it"
    parser.add_argument("model", metavar="MODEL", help=what)
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--template", action="store_true", help="print the chat template and nothing else")
    parser.add_argument("--json", action="store_true", help="everything as JSON")


def run(args: argparse.Namespace) -> int:
    with described(args.model) as (path, name), open_model(path) as file:
        facts = facts_of(name, file)
    if args.json:
        print(json.dumps(facts, indent=1))
    elif args.template:
        print(facts["text"].get("template") or "")
    else:
        print("\n\n".join(_sections(facts, tensors=args.tensors)))
    return 0


# --- facts ------------------------------------------------------------------------------------------------


def facts_of(name: str, file: ModelFile) -> Facts:
    """Everything as plain data. What can't be understood is in "warnings", and its part is empty."""
    warnings: list[str] = []
    spec = _try(lambda: spec_of(file), warnings)
    model = _try(lambda: load_model(file), warnings) if spec and file.tensors else None
    facts: Facts = {
        "path": name,
        "kind": file.kind,
        "files": [str(p) for p in file.paths],
        "bytes": file.nbytes,
        "architecture": architecture(spec) if spec else {},
        "formats": formats(file),
        "layers": layers(model) if model else [],
        "kv_bytes_per_token": kv_bytes(spec) if spec else {},
        "text": text(file, warnings),
        "tensors": [
            {"name": t.name, "format": t.fmt, "shape": list(t.shape), "bytes": t.nbytes} for t in file.tensors.values()
        ],
    }
    return {**facts, "warnings": [*warnings, *_surprises(file, spec, model, facts)]}


def _try(action: Any, warnings: list[str]) -> Any:
    try:
        return action()
    except HeadraceError as error:
        warnings.append(str(error))
        return None


def architecture(spec: Spec) -> Facts:
    """The numbers people ask for; what differs between blocks as the set of its values."""
    blocks = spec.blocks
    return {
        "family": spec.family,
        "parameters": spec.parameters,
        "blocks": len(blocks),
        "width": spec.width,
        "ffn": _values(b.ffn for b in blocks),
        "heads": _values(b.heads for b in blocks),
        "kv_heads": _values(b.kv_heads for b in blocks),
        "head_dim": _values(b.head_dim for b in blocks),
        "windows": dict(Counter(str(b.window or "all") for b in blocks)),
        "vocabulary": spec.vocab,
        "context": spec.context,
        "tied_output": spec.tied,
    }


def _values(values: Iterable[int]) -> int | list[int]:
    found = sorted(set(values))
    return found[0] if len(found) == 1 else found


def formats(file: ModelFile) -> list[Facts]:
    """Storage formats by bytes, largest first."""
    size: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for t in file.tensors.values():
        size[t.fmt] += t.nbytes
        count[t.fmt] += 1
    return [{"format": f, "tensors": count[f], "bytes": n, "known": f in KNOWN} for f, n in size.most_common()]


def layers(model: Model) -> list[Facts]:
    """Each layer with its bytes in the file (a tied output matrix counts in ``embed``) and its formats."""
    return [
        {"key": la.key, "bytes": la.nbytes, "formats": sorted({p.fmt for p in la.tensors.values() if not p.shares})}
        for la in model.layers
    ]


def kv_bytes(spec: Spec) -> dict[str, int]:
    return {name: sum(spec.kv_bytes(key, *bits) for key in spec.keys) for name, bits in PRESETS.items()}


def text(file: ModelFile, warnings: list[str]) -> Facts:
    """The tokenizer and its chat template."""
    if file.kind == "hf" and not file.metadata.get("files"):
        return {}  # a bare config.json
    from headrace.text.tokenizer import Tokenizer

    tokenizer = _try(lambda: Tokenizer.from_metadata(file.metadata), warnings)
    if tokenizer is None:
        return {}
    return {
        "tokens": tokenizer.size,
        "adds_bos": tokenizer.add_bos,
        "ends": sorted(tokenizer.decode([i], special=True) for i in tokenizer.ends),
        "template": tokenizer.template,
    }


def _surprises(file: ModelFile, spec: Spec | None, model: Model | None, facts: Facts) -> Iterator[str]:
    if model is not None:
        used = {plan.source.tensor for layer in model.layers for plan in layer.tensors.values()}
        idle = [name for name in file.tensors if name not in used and name != "rope_freqs.weight"]
        if idle:
            more = f" and {len(idle) - 1} more" if len(idle) > 1 else ""
            yield f"The file holds tensors that nothing uses: {show(idle[0])}{more}."
    if spec is not None and facts["text"]:
        if facts["text"]["template"] is None:
            yield "There is no chat template: `headrace run` continues the prompt as it stands."
        if facts["text"]["tokens"] > spec.vocab:
            yield f"The tokenizer has {facts['text']['tokens']} tokens and the model {spec.vocab}: they don't fit."


# --- for people -------------------------------------------------------------------------------------------


def _sections(facts: Facts, *, tensors: bool) -> Iterator[str]:
    if facts["architecture"]:
        yield table(list(_architecture(facts)))
    if facts["formats"]:
        known = {True: "", False: "not supported"}
        rows = [(f["format"], f["tensors"], human(f["bytes"]), known[f["known"]]) for f in facts["formats"]]
        yield table([("format", "tensors", "bytes", ""), *rows], right=(1, 2))
    if facts["layers"]:
        yield table([("layer", "bytes each", "formats"), *_grouped(facts["layers"])], right=(1,))
    if facts["kv_bytes_per_token"]:
        yield table(_cache(facts["kv_bytes_per_token"], facts["architecture"]["context"]), right=(1, 2, 3))
    if tensors and facts["tensors"]:
        listed = [
            (show(t["name"]).strip("'"), t["format"], "x".join(map(str, t["shape"])), human(t["bytes"]))
            for t in facts["tensors"]
        ]
        yield table([("tensor", "format", "shape", "bytes"), *listed], right=(3,))
    if facts["warnings"]:
        yield "\n".join(f"! {warning}" for warning in facts["warnings"])


def _architecture(facts: Facts) -> Iterator[tuple[str, str]]:
    a, t = facts["architecture"], facts["text"]
    yield "model", facts["path"] + (f" and {len(facts['files']) - 1} more files" if len(facts["files"]) > 1 else "")
    yield "architecture", f"{a['family']}, {a['parameters'] / 1e6:,.1f} M parameters, {a['blocks']} blocks"
    yield "width", f"{a['width']}, feed-forward {a['ffn']}"
    yield "attention", f"{a['heads']} heads of {a['head_dim']}, {a['kv_heads']} for keys and values"
    if set(a["windows"]) != {"all"}:
        seen = {w: "all" if w == "all" else f"the last {w}" for w in a["windows"]}
        yield "windows", ", ".join(f"{count} blocks see {seen[w]} tokens" for w, count in a["windows"].items())
    yield "vocabulary", f"{a['vocabulary']}" + (", output matrix shared with the embedding" if a["tied_output"] else "")
    yield "context", f"{a['context']} tokens"
    if facts["bytes"]:
        yield "weights", f"{human(facts['bytes'])}, {8 * facts['bytes'] / a['parameters']:.2f} bits a parameter"
    else:
        sixteen, four = human(2 * a["parameters"]), human(4.5 / 8 * a["parameters"])
        yield "weights", f"none here; at 16 bits {sixteen}, at 4.5 bits {four}"
    if t:
        yield "ends with", " ".join(show(name).strip("'") for name in t["ends"]) or "nothing"
        yield "chat template", f"{len(t['template'])} characters (--template prints it)" if t["template"] else "none"


def _grouped(found: list[Facts]) -> Iterator[tuple[str, str, str]]:
    """Neighbours of the same size and formats in one line."""
    for (size, kinds), group in groupby(found, lambda la: (la["bytes"], " ".join(la["formats"]))):
        keys = [la["key"] for la in group]
        name = keys[0] if len(keys) == 1 else f"{keys[0]} to {keys[-1].removeprefix('block.')} ({len(keys)})"
        yield name, human(size), kinds or "shared"


def _cache(per_token: dict[str, int], context: int) -> list[tuple[str, str, str, str]]:
    usual = min(4096, context)
    rows = [("cache K/V bits", "a token", f"{usual} tokens", f"{context} tokens")]
    rows += [(k, human(n), human(n * usual), human(n * context)) for k, n in per_token.items()]
    return rows
