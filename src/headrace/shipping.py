"""Which ranks give a model's layers to which, and what a rank without the file does (``cluster/ship.py`` has how)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from headrace.cluster.handshake import Hello, Plan
from headrace.cluster.members import Link
from headrace.cluster.ship import Giver, Hear, Parcel, nearest, places_of
from headrace.config import resolve
from headrace.drafting import Draft
from headrace.model.layers import Model
from headrace.options import Options


def giver_of(link: Link, model: Model, draft: Draft | None, options: Options) -> Giver | None:
    """What gives this rank's files to others, where that is asked for."""
    files = [model.file, *([draft.model.file] if draft is not None and draft.own else [])]
    return Giver(link, files) if options.ship else None


def begin(stack: ExitStack, paths: Sequence[Path], options: Options, link: Link, hear: Hear) -> dict[int, Parcel]:
    """What this rank lacks of the model (0) and the draft model (1), so far that it can be opened."""
    folder, tell, found = resolve().cache / "ships", options.tell or (lambda line: None), {}
    for which, path in enumerate(paths):
        if options.ship and not path.exists():
            found[which] = Parcel(link, which, folder, hear, tell)
            stack.callback(found[which].close)
    return found


def finish(shipped: dict[int, Parcel], model: Model, draft: Draft | None, plan: Plan, rank: int) -> None:
    """This rank's layers, into the file that was shipped where it is one."""
    own: Sequence[int] = range(plan.firsts[rank], plan.ends[rank])
    if draft is not None and rank >= plan.targets:
        model, own = draft.model, [draft.numbers[i] for i in own]
    if (parcel := shipped.get(_which(draft, plan.targets, rank))) is not None:
        parcel.fetch(places_of(model, own), plan.givers[rank], f"{len(own)} layers")


def givers(hellos: Sequence[Hello], hosts: Sequence[str], draft: Draft | None, targets: int) -> tuple[int, ...]:
    """Whom each rank asks for its layers: itself where it has them."""
    whole = [i for i, hello in enumerate(hellos) if not hello.lacks]
    lacking = {i for i, hello in enumerate(hellos) if hello.lacks >> _which(draft, targets, i) & 1}
    return tuple(nearest(i, hosts, whole) if i in lacking else i for i in range(len(hellos)))


def _which(draft: Draft | None, targets: int, rank: int) -> int:
    """The file that a rank's layers are in: the model's (0) or the draft model's (1)."""
    return int(draft is not None and draft.own and rank >= targets)
