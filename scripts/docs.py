"""Documents made from the code: ``docs/cli.md`` from the parsers, tables of figures from ``benchmarks/results``.

``python scripts/docs.py`` exits with 1 when a document is behind; ``--write`` brings it up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from headrace.cli import main as cli  # noqa: E402
from headrace.cli import speculative  # noqa: E402
from headrace.config import VARIABLES  # noqa: E402

CLI = ROOT / "docs" / "cli.md"
FLEXGEN = ROOT / "docs" / "flexgen.md"
PIPEINFER = ROOT / "docs" / "pipeinfer.md"
WITH_FIGURES = (ROOT / "README.md", ROOT / "docs" / "speculation.md")
RESULTS = ROOT / "benchmarks" / "results"
Table = tuple[list[str], list[list[Any]]]
FIGURES = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def command_line() -> str:
    """The text of docs/cli.md."""
    top = cli.parser()
    lines = ["# Commands", "", "Made from the program's own help by `scripts/docs.py --write`; don't edit.", ""]
    lines += ["`headrace COMMAND --help` prints the same. Results go to stdout, everything else to stderr.", ""]
    lines += ["Exit status: 0 done; 2 an error, told in one line beginning with `headrace:`; 130 ended by Ctrl-C.", ""]
    for command in _commands(top).values():
        lines += _command(command)
    lines += ["## Environment", "", "| variable | what it does |", "|---|---|"]
    lines += [f"| `{name}` | {_cell(what)} |" for name, what in VARIABLES.items()]
    return "\n".join(lines) + "\n"


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _command(parser: argparse.ArgumentParser, level: str = "##") -> Iterator[str]:
    yield from (f"{level} {parser.prog}", "", parser.description or "", "")
    rows = [row for action in parser._actions if (row := _argument(action))]
    if rows:
        yield from ("| argument | what it does |", "|---|---|", *rows, "")
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            lines = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, sub in action.choices.items():
                sub.description = sub.description or lines[name]
                yield from _command(sub, level + "#")


def _argument(action: argparse.Action) -> str | None:
    if isinstance(action, argparse._HelpAction | argparse._SubParsersAction) or action.help == argparse.SUPPRESS:
        return None
    value = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper())
    if action.option_strings:
        shown = ", ".join(f"`{flag}`" for flag in action.option_strings)
        shown += "" if action.nargs == 0 else f" `{value}`"
    else:
        shown = f"`{value}`"
    text = (action.help or "") % {**vars(action), "prog": ""}
    return f"| {shown} | {_cell(text)} |"


def flexgen_flags(text: str) -> str:
    """docs/flexgen.md with its table of flags."""
    from headrace.cli.flexgen import flags

    table = ["| flag | here | what it does, or why not |", "|---|---|---|"]
    table += [f"| `{name}` | {here} | {_cell(what)} |" for name, here, what in flags()]
    body = "\n".join(table)
    return re.sub(r"(<!-- flags -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}{body}\n{m[2]}", text, flags=re.DOTALL)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def pipeinfer() -> str:
    """The text of docs/pipeinfer.md."""
    lines = ["# PipeInfer's command line", "", "Made by `scripts/docs.py --write`; don't edit.", ""]
    lines += [(speculative.__doc__ or "").split("\n\n", 1)[1].rstrip(), ""]
    lines += ["| option there | here |", "|---|---|"]
    return "\n".join(lines + [f"| `{flag}` | {_cell(what)} |" for flag, what in speculative.rows()]) + "\n"


def figures(text: str) -> str:
    """A document with every table between ``<!-- figures: NAME -->`` and ``<!-- end -->`` made from a benchmark's JSON.

    ``TABLES`` says which, and how.
    """

    def fill(found: re.Match[str]) -> str:
        source, make = TABLES[found[2]]
        path = RESULTS / f"{source}.json"
        if not path.exists():
            return found[1] + found[3]
        columns, rows = make(json.loads(path.read_text(encoding="utf-8")))
        table = [columns, ["---"] * len(columns), *rows]
        lines = ["| " + " | ".join(_cell(str(cell)) for cell in row) + " |" for row in table]
        return found[1] + "\n".join(lines) + "\n" + found[3]

    return FIGURES.sub(fill, text)


def _vs_llamacpp(data: Any) -> Table:
    columns = ["model", "threads", "decode", "ratio", "prefill of 512", "ratio", "weights read", "of bandwidth"]
    rows = []
    for model, results in data["results"].items():
        for r in results:
            m = r["medians"]
            decode = [f"{m['headrace_decode']} / {m['llamacpp_decode']}", f"{r['decode_ratio']:.2f}"]
            prefill = [f"{m['headrace_prefill']} / {m['llamacpp_prefill']}", f"{r['prefill_ratio']:.2f}"]
            read = [f"{r['weights_read_gb_s']} GB/s", f"{100 * r['share_of_bandwidth']:.0f}%"]
            rows.append([model, r["threads"], *decode, *prefill, *read])
    return columns, rows


STRATEGIES = ("plain, tokens/s", "sync, draft 8", "sync, best", "PipeInfer's, best", "ours")


def _speculation(data: Any) -> Table:
    """Eight nodes on Gigabit."""
    rows = []
    for c in data["cells"]:
        if (c["nodes"], c["link"]) == (8, "1G"):
            times = [f"{c[k]:.2f}" for k in ("sync8", "sync", "pipeinfer", "ours")]
            rows.append(
                [c["curve"], c["acceptance"], f"{c['plain']:.2f}", *times, f"{100 * c['ours'] / c['bound']:.0f}%"]
            )
    return ["rows' cost", "draft right", *STRATEGIES, "of the bound"], rows


def _speculation_all(data: Any) -> Table:
    rows = []
    for c in data["cells"]:
        pipe = c["pipeinfer_setting"].removeprefix("pipeinfer ")
        best = [f"{c['sync']:.2f} ({c['sync_setting'].removeprefix('sync ')})", f"{c['pipeinfer']:.2f} ({pipe})"]
        place = [c["curve"], c["nodes"], c["acceptance"], c["link"], f"{c['plain']:.2f}"]
        rows.append([*place, f"{c['sync8']:.2f}", *best, f"{c['ours']:.2f}", f"{c['bound']:.1f}"])
    return ["cost", "nodes", "a", "link", *STRATEGIES, "bound"], rows


def _speculation_pair(data: Any) -> Table:
    """Recorded from a real pair: times plain, eight nodes."""
    rows = []
    for c in data["cells"]:
        sync = f"{c['sync']:.2f} ({c['sync_setting'].removeprefix('sync ')})"
        sync = sync if c["sync"] >= c["sync8"] else f"{c['sync8']:.2f} (depth 8)"
        pipe = f"{c['pipeinfer']:.2f} ({c['pipeinfer_setting'].removeprefix('pipeinfer ')})"
        rows.append([c["curve"], c["link"], f"{c['plain']:.2f}", f"{c['sync8']:.2f}", sync, pipe, f"{c['ours']:.2f}"])
    return ["cost", "link", *STRATEGIES], rows


def _speculation_asked(data: Any) -> Table:
    return ["what was asked", "measured"], [[what, f"{value:.2f}"] for what, value in data["asked"].items()]


def _ablation(data: Any) -> Table:
    columns, rows = ["without", "tokens/s", "of everything", "streamed or crossed", "waited for it"], []
    for name, c in data["cases"].items():
        if "refused" in c:
            rows.append([name, "refused: doesn't fit", "", "", ""])
            continue
        moved = f"{c['read_gb'] or c['crossed_gb']:.1f} GB"
        share = f"{100 * c['of_everything']:.0f}%"
        rows.append([name, f"{c['tokens_per_s']:.2f}", share, moved, f"{100 * c['waited_share']:.0f}%"])
    return columns, rows


def _streaming(data: Any) -> Table:
    columns = [
        "model",
        "GB",
        "limit, MiB",
        "sequences",
        "next tokens",
        "whole job",
        "tokens/s",
        "streamed",
        "limit hit",
    ]
    rows = []
    for r in data["runs"]:
        shares = [f"{100 * r[k]:.0f}%" for k in ("decode_share", "whole_share")]
        many = max(n if isinstance(n, int) else max(n) for n in r["pass_rows"][1:])
        place = [r["name"], f"{r['gigabytes']:.1f}", r["limit_mib"], many]
        streamed = f"{r['streamed_gb']:.1f} GB"
        rows.append([*place, *shares, f"{r['decode_tokens_per_s']:.2f}", streamed, f"{r['failcnt']} times"])
    return columns, rows


TABLES: dict[str, tuple[str, Callable[[Any], Table]]] = {
    "vs_llamacpp": ("vs_llamacpp", _vs_llamacpp),
    "ablation": ("ablation", _ablation),
    "streaming": ("streaming", _streaming),
    "speculation": ("speculation_table", _speculation),
    "speculation_all": ("speculation_table", _speculation_all),
    "speculation_pair": ("speculation_pair", _speculation_pair),
    "speculation_asked": ("speculation_table", _speculation_asked),
}


def documents() -> Iterator[tuple[Path, str]]:
    """(file, what it should hold) of every generated document."""
    yield CLI, command_line()
    yield FLEXGEN, flexgen_flags(FLEXGEN.read_text(encoding="utf-8"))
    yield PIPEINFER, pipeinfer()
    for path in WITH_FIGURES:
        yield path, figures(path.read_text(encoding="utf-8"))


def behind() -> list[str]:
    return [p.name for p, text in documents() if not p.exists() or p.read_text(encoding="utf-8") != text]


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        for path, wanted in list(documents()):
            path.write_text(wanted, encoding="utf-8")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    if late := behind():
        sys.exit(f"{', '.join(late)}: behind the code; run `python scripts/docs.py --write` and commit")
    print("generated documents: up to date")
