"""Options for guessing ahead: which drafters, which policy, and the knobs people know from PipeInfer."""

from __future__ import annotations

import argparse
from typing import Any

from headrace.cli.parser import real, whole

KNOBS = {
    "draft": (("--draft",), whole(1, 64), "N", "most guesses at a time (default: 16 for pipeinfer, 8 for sync)"),
    "np": (("-np", "--parallel"), whole(1, 20), "N", "most branches of a tree (default: pipeinfer 1, ours 5)"),
    "pa": (("-pa", "--p-accept"), real(0, 1), "P", "where a branch stops (default: pipeinfer 0.5, ours 0.02)"),
    "ps": (("-ps", "--p-split"), real(0, 1), "P", "pipeinfer: a candidate over it splits off (default 0.1)"),
    "pr": (("-pr", "--p-recovery"), real(0), "P", "pipeinfer: raises -pa with every tree until one is right"),
    "pd": (("-pd", "--p-decay"), real(0), "P", "pipeinfer: lowers it every time no tree was made (default 0)"),
}
"""Knob -> flags, type, metavar, help."""
OURS = ("draft", "np", "pa")


def add_drafting(parser: argparse.ArgumentParser) -> None:
    """Which drafters, and which of their guesses are computed."""
    add = parser.add_argument_group(
        "guessing ahead", "Guesses fill what would idle; the text stays the same, whatever is guessed."
    ).add_argument
    draft = "a smaller model that drafts: path or name as for -m. Its tokens should be the model's own"
    add("-md", "--model-draft", metavar="MODEL", help=draft)
    add("--draft-layers", type=whole(1), metavar="N", help="the model's own first N blocks draft")
    add("--draft-ngram", action="store_true", help="prompt lookup: what followed the last words before comes again")
    staged = (
        "a draft for the draft: prompt lookup guesses for the drafter, which takes fewer passes for the same drafts"
    )
    add("--draft-for-draft", choices=("ngram",), help=staged)
    policy = (
        "which guesses are computed: ours measures what pays; pipeinfer and sync (draft, verify, draft) follow the "
        "options below (default: pipeinfer when one of -ps, -pr and -pd is given, else ours)"
    )
    add("--policy", choices=("ours", "pipeinfer", "sync"), help=policy)
    for name, (flags, kind, metavar, text) in KNOBS.items():
        add(*flags, dest=f"knob_{name}", type=kind, metavar=metavar, help=text)


def drafting_of(args: argparse.Namespace) -> dict[str, Any]:
    """What ``add_drafting``'s options say, as fields of ``Options``; nothing where they weren't offered."""
    if not hasattr(args, "draft_ngram"):
        return {}
    from headrace.cli.generation import find_named

    named = ["ngram"] if args.draft_ngram else []
    named += [f"layers:{args.draft_layers}"] if args.draft_layers else []
    knobs = {name: value for name in KNOBS if (value := getattr(args, f"knob_{name}")) is not None}
    policy = args.policy or ("ours" if set(knobs) <= set(OURS) else "pipeinfer")
    model = [find_named(args.model_draft, args)] if args.model_draft is not None else []
    staged = args.draft_for_draft
    return {"drafter": (*named, *model), "draft_for_draft": staged, "policy": policy, "knobs": knobs}
