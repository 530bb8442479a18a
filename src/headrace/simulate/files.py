"""A cluster file and two models as what the simulator needs: seconds of a layer on every node.

The file is TOML. It says how fast nodes are (``rate``: bytes of weights a second at one row, which is what decoding is
bound by; the model says how many there are) or, where somebody measured, how long a layer takes (``layer_time``).
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from headrace.cluster.split import by_weight
from headrace.errors import BadFile, BadRequest
from headrace.formats.files import read_text
from headrace.formats.index import open_model
from headrace.model.layers import load_model, spec_of
from headrace.plan.sizes import ModelCost
from headrace.simulate.acceptance import Acceptance, Ranks, Recorded
from headrace.simulate.cluster import CPU_CURVE, GPU_CURVE, Cluster, Curve
from headrace.simulate.network import GIGABIT, LinkSpec


@dataclass(frozen=True)
class Sizes:
    """A model to the simulator: blocks, width, bytes a pass reads (the output matrix is spread over the blocks)."""

    name: str
    layers: int
    width: int
    nbytes: float


def by_count(text: str, bits: float) -> Sizes | None:
    """A model known by its parameters alone, like 70B or 135M: 70B is 80 layers of width 8192, others shaped alike.

    Parameters are layers x width^2 times a constant, and layers grow as width, so both go with the cube root.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([BM])", text)
    if found is None:
        return None
    count = float(found[1]) * {"B": 1e9, "M": 1e6}[found[2]]
    if not 1e6 <= count <= 1e15:
        raise BadRequest(f"A model of {text} can't be simulated; give 1M to 1000000B parameters.")
    scale = (count / 70e9) ** (1 / 3)
    return Sizes(text, max(1, round(80 * scale)), max(64, round(8192 * scale)), count * bits / 8)


def by_file(path: Path, bits: float | None) -> Sizes:
    """A model file's own bytes, or, of a bare config.json, ``bits`` a weight."""
    with open_model(path) as file:
        spec = spec_of(file)
        if file.tensors and bits is not None:
            raise BadRequest(f"{path}: says itself how many bits its weights have; leave --bits out.")
        if file.tensors:
            layers = load_model(file).layers
            table = layers[-1].tensors["output"]
            nbytes = float(sum(layer.nbytes for layer in layers[1:]) + (table.nbytes if table.shares else 0))
        else:
            each = (4.5 if bits is None else bits) / 8
            cost = ModelCost.from_spec(path.stem, spec, lambda _, n, k: round(n * k * each))
            nbytes = float(sum(layer.nbytes for layer in cost.layers[1:]))
        return Sizes(path.name, len(spec.blocks), spec.width, nbytes)


def load_ranks(text: str, seed: int) -> Ranks:
    """Acceptance as a chance of the draft's first choice, or a file recorded from a real pair.

    The file is JSON: "ranks" (at which place of the draft's list the target's token was, -1 for none), and
    "probabilities" (what the draft said of its list), one entry a position.
    """
    try:
        first = float(text)
    except ValueError:
        if not Path(text).exists():
            raise BadFile(
                f"{text}: is neither a number nor a file; give an acceptance like 0.7, or a recording."
            ) from None
        return _recorded(Path(text))
    if not 0 <= first <= 1:
        raise BadRequest(f"An acceptance of {text} can't be: it is a share, from 0 to 1.")
    return Acceptance(first, seed)


def _recorded(path: Path) -> Recorded:
    try:
        data = json.loads(read_text(path, "recording"))
        ranks = [int(rank) for rank in data["ranks"]]
        said = [[float(p) for p in each] for each in data["probabilities"]]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise BadFile(f"{path}: no recording with ranks and probabilities ({error!r}).") from None
    if (
        not ranks
        or len(ranks) != len(said)
        or not all(said)
        or any(not -1 <= r < len(s) for r, s in zip(ranks, said, strict=True))
        or not all(0 <= p < 1.01 for each in said for p in each)
    ):
        raise BadFile(
            f"{path}: needs one rank (-1: not listed) and one list of probabilities for each position, and has others."
        )
    return Recorded(ranks, said)


# --- cluster files ----------------------------------------------------------------------------------------

FIELDS = {
    "nodes": int, "layers": list, "rate": (int, float, list), "layer_time": (int, float, list), "curve": (str, list),
    "width": int, "link": dict, "draft_rate": (int, float), "draft_time": (int, float), "draft_layers": int,
}  # fmt: skip
"""What a file may say, and of which kind."""
NODES, LAYERS, MOST = 4096, 100_000, 1e15
"""The most of a cluster, of a model, and of any number in a file, which is also not under its inverse."""


def load_cluster(path: Path, model: Sizes | None = None, draft: Sizes | None = None) -> Cluster:
    """The cluster of a TOML file, holding these models. Raises BadFile. Fields:

    nodes: of the target (when no list says it); layers: of each (default: shared out by speed); rate or layer_time:
    of each node, or one number for all; curve: "cpu", "gpu", or [[rows, cost], ...]; width: values a row carries
    (default: the model's); link: latency, rate, jitter, stall, stall_time; the drafter's node, one more than those,
    has draft_rate (default: ``rate``, if that is one number) or draft_time, and perhaps draft_layers.
    """
    try:
        data = tomllib.loads(read_text(path, "cluster file"))
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path}: not a readable TOML file: {error}.") from None
    try:
        return _cluster(data, model, draft)
    except (TypeError, ValueError, KeyError, OverflowError, BadRequest) as error:
        raise BadFile(f"{path}: {str(error).rstrip('.')}.") from None


def _cluster(data: Mapping[str, Any], model: Sizes | None, draft: Sizes | None) -> Cluster:
    if unknown := sorted(set(data) - set(FIELDS)):
        raise ValueError(f"unknown fields {unknown}; a cluster has {sorted(FIELDS)}")
    for name, value in data.items():
        kinds = FIELDS[name]
        if not isinstance(value, kinds) or isinstance(value, bool):  # type: ignore[arg-type]
            raise ValueError(f"{name} is {value!r}, which is of the wrong kind")
    if ("rate" in data) == ("layer_time" in data):
        raise ValueError("give either rate (bytes of weights a second) or layer_time (seconds of a layer)")
    lists = {name: len(data[name]) for name in ("layers", "rate", "layer_time") if isinstance(data.get(name), list)}
    counts = {*lists.values(), *([data["nodes"]] if "nodes" in data else [])}
    if not counts or max(counts) > NODES:
        raise ValueError(f"how many nodes? Give a number from 1 to {NODES}")
    if len(counts) != 1 or min(counts) < 1:
        raise ValueError(f"how many nodes? nodes is {data.get('nodes', 'missing')}, lists have {lists or 'no say'}")
    n = counts.pop()
    if "rate" in data:
        if model is None:
            raise ValueError("nodes have a rate, so the model must be known (--model)")
        times = [model.nbytes / model.layers / rate for rate in _positive(data, "rate", n)]
    else:
        times = _positive(data, "layer_time", n)
    layers = _layers(data, times, model)
    width = data.get("width", model.width if model else Cluster.width)
    if not 1 <= width <= 1 << 24:
        raise ValueError(f"width must be from 1 to {1 << 24}")
    made = Cluster(layers, tuple(times), _curve(data.get("curve", "cpu")), _link(data), width,
                   data.get("draft_layers", Cluster.draft_layers), _draft_time(data, draft))  # fmt: skip
    if not 1 <= made.draft_layers <= LAYERS or made.total > LAYERS:
        raise ValueError(f"a model has 1 to {LAYERS} layers")
    return made


def _positive(data: Mapping[str, Any], name: str, n: int) -> list[float]:
    value = data[name]
    numbers = [float(x) for x in (value if isinstance(value, list) else [value] * n)]
    if not all(1 / MOST <= x <= MOST for x in numbers):
        raise ValueError(f"{name} must be positive, and no more than {MOST:g}")
    return numbers


def _layers(data: Mapping[str, Any], times: list[float], model: Sizes | None) -> tuple[int, ...]:
    if "layers" not in data:
        if model is None:
            raise ValueError("the layers of each node are missing, or a model whose layers can be shared out (--model)")
        if model.layers < len(times):
            raise ValueError(f"{model.name} has {model.layers} layers, fewer than there are nodes ({len(times)})")
        return tuple(by_weight([1.0] * model.layers, [1 / t for t in times]))
    layers = tuple(int(count) for count in data["layers"])
    if min(layers) < 1:
        raise ValueError("layers must be positive on each node")
    if model is not None and sum(layers) != model.layers:
        raise ValueError(f"the nodes hold {sum(layers)} layers and {model.name} has {model.layers}")
    return layers


def _draft_time(data: Mapping[str, Any], draft: Sizes | None) -> float:
    if "draft_time" in data:
        if draft is not None or "draft_rate" in data:
            raise ValueError("draft_time says all there is to say of the draft model; leave draft_rate and --draft out")
        return _positive(data, "draft_time", 1)[0]
    if draft is None:
        return 0.0
    rate = data.get("draft_rate", data.get("rate"))
    if rate is None or isinstance(rate, list):
        raise ValueError("there is a draft model; give its node's draft_rate (bytes of weights a second)")
    return draft.nbytes / _positive({"draft_rate": rate}, "draft_rate", 1)[0]


def _curve(value: str | list[Any]) -> Curve:
    if isinstance(value, str):
        named = {"cpu": CPU_CURVE, "gpu": GPU_CURVE}
        if value not in named:
            raise ValueError(f"curve {value!r} isn't known; write cpu, gpu, or [[rows, cost], ...]")
        return named[value]
    points = tuple((int(rows), float(cost)) for rows, cost in value)
    ascending = all(a[0] < b[0] and a[1] <= b[1] <= MOST for a, b in pairwise(points))
    if len(points) < 2 or points[0] != (1, 1.0) or not ascending:
        raise ValueError("a curve begins with [1, 1.0], has two points or more, and rises")
    return Curve(points)


def _link(data: Mapping[str, Any]) -> LinkSpec:
    if "link" not in data:
        return GIGABIT
    known = [f.name for f in fields(LinkSpec)]
    if unknown := sorted(set(data["link"]) - set(known)):
        raise ValueError(f"unknown fields {unknown} in link; it has {known}")
    link = LinkSpec(**{name: float(value) for name, value in data["link"].items()})
    rest = link.latency, link.jitter, link.stall, link.stall_time
    if not 1 / MOST <= link.rate <= MOST or not all(0 <= x <= MOST for x in rest) or link.stall > 1:
        raise ValueError(
            f"link needs a positive rate, nothing in it is negative or over {MOST:g}, and stall is a share"
        )
    return link
