"""``headrace cache``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from headrace import config
from headrace.cli.show import human, table
from headrace.formats.files import free_bytes
from headrace.store import cache


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = "Lists the fetched models, removes one, or prints the folder they are kept in."
    actions = parser.add_subparsers(dest="action", metavar="ACTION", parser_class=type(parser))
    listing = actions.add_parser("list", help="what is there, with sizes (the default)")
    listing.add_argument("--json", action="store_true", help="as JSON")
    removal = actions.add_parser("remove", help="delete models")
    removal.add_argument("names", nargs="+", metavar="NAME", help="a name as `headrace cache` lists it")
    actions.add_parser("path", help="print the cache's folder")


def run(args: argparse.Namespace) -> int:
    root = config.resolve().cache
    if args.action == "path":
        print(root)
    elif args.action == "remove":
        for name in args.names:
            gone = cache.remove(root, name)
            print(f"removed {gone.name} ({human(gone.nbytes)})")
    else:
        _list(root, getattr(args, "json", False))
    return 0


def _list(root: Path, as_json: bool) -> None:
    found = cache.entries(root)
    if as_json:
        rows = [{"name": e.name, "bytes": e.nbytes, "complete": not e.partial, "path": str(e.path)} for e in found]
        print(json.dumps({"cache": str(root), "models": rows}, indent=1))
        return
    if found:
        print(table([(e.name, human(e.nbytes), "incomplete" if e.partial else "") for e in found], right=(1,)))
    total = human(sum(e.nbytes for e in found))
    print(f"{len(found)} models, {total} in {root}; {human(free_bytes(root))} free")
