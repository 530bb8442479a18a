"""``headrace pack``: the file that layers stream from, made ahead."""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace import config
from headrace.cli.generation import find_named, waiting
from headrace.cli.options import MODEL_HELP, REQUANT_HELP
from headrace.cli.show import human, note


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Makes the file that a model's layers stream from when they don't fit (--ram), so no later command has to. "
        "It is named by its content's source and layout and takes that name only when it is whole; stopped, the same "
        "command goes on where it was. The room on the disk is checked, and said, first. Takes memory of a tensor."
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--requant", choices=("q4", "q8"), help=REQUANT_HELP)
    parser.add_argument(
        "--to", type=Path, metavar="DIR", help="folder (default: packs in the cache folder, where it is looked for)"
    )


def run(args: argparse.Namespace) -> int:
    from headrace.kernels.dispatch import make_device
    from headrace.memory.stream import pack
    from headrace.model.layers import load_model
    from headrace.options import Options
    from headrace.placement import open_file

    path = find_named(args.model)
    folder = args.to or config.resolve().cache / "packs"
    with open_file(path, Options(requant=args.requant)) as file:
        model = load_model(file)
        blocks = [i for i, layer in enumerate(model.layers) if layer.kv is not None]
        told: list[str] = []

        def tell(line: str) -> None:
            told.append(line)
            note(line)

        with waiting("packing"):
            made = pack(make_device(threads=1, cpu=config.resolve().cpu), model, blocks, folder, tell)
    print(made.path)
    note(f"{human(made.path.stat().st_size)}" + ("" if told else ", there already"))
    return 0
