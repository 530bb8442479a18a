"""``headrace pull``."""

from __future__ import annotations

import argparse

from headrace import config
from headrace.cli.show import Bar, note
from headrace.errors import BadRequest
from headrace.store import hub, known


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Fetches a model into the cache and prints its path. An interrupted fetch goes on where it stopped; sizes and "
        "hashes are checked, and a file gets its name only when they are right."
    )
    names = ", ".join(known.KNOWN)
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="hf:ORG/REPO for a repository's model, hf:ORG/REPO:FILE for one of several GGUF files (part of the name "
        f"will do, like Q4_K_M), hf:ORG/REPO@REVISION for a revision; or a model known by name: {names}",
    )


def run(args: argparse.Namespace) -> int:
    settings = config.resolve()
    if args.model in known.KNOWN:
        print(known.fetch(known.KNOWN[args.model], settings.cache, note))
        return 0
    if not args.model.startswith("hf:"):
        raise BadRequest(f"{args.model!r} is neither hf:ORG/REPO nor a model known by name ({', '.join(known.KNOWN)}).")
    with Bar() as bar:
        path = hub.pull(hub.parse(args.model), settings, bar, note)
    print(path)
    return 0
