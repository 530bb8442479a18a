"""The house rules that linters don't know: sizes, one-way imports, one reader of the environment.

``python scripts/house.py`` prints each breach and exits with 1 when there is one. Tests use the functions.
"""

from __future__ import annotations

import ast
import functools
import io
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "headrace"

FILE_LINES, FUNCTION_LINES, PACKAGE_LINES = 400, 60, 19_500
"""The package's lines are its Python without blank lines, comments and docstrings; C++ obeys the limit on files."""
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
CODE = (".py", ".cpp", ".h")

RANKS: tuple[tuple[str, ...], ...] = (
    ("errors", "config", "system"),
    ("formats",),
    ("text", "kernels"),
    ("model", "store"),
    ("memory", "plan"),
    ("run",),
    ("speculate", "cluster"),
    ("options", "results"),
    ("measured",),
    ("placement",),
    ("planning",),
    ("drafting", "sharing"),
    ("setup", "shipping"),
    ("ensemble",),
    ("engine",),
    ("simulate", "jobs", "serve"),
    ("cli",),
    ("__main__",),
)
"""Parts of the package from left to right: a part imports from itself and from the left (docs/design.md)."""

NEEDED = ("numpy", "tokenizers", "jinja2")
"""Packages an install brings. Anything else is imported inside a function, by those who asked for it."""
OPTIONAL_MODULES = ("kernels/torch", "cluster/mpi")
"""Beginnings of modules that are all about an optional package; they are imported late themselves."""

ENVIRONMENT = ("environ", "environb", "getenv", "putenv")


@functools.cache
def parse(text: str) -> ast.Module:
    return ast.parse(text)


def python_files(*folders: str) -> list[Path]:
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py"))


def sizes(files: Sequence[Path]) -> Iterator[str]:
    """Files and functions that are too long. A function's lines count from ``def`` to its end, docstring included."""
    for path in files:
        text = path.read_text(encoding="utf-8")
        lines = text.count("\n")
        if lines > FILE_LINES:
            yield f"{_name(path)}: {lines} lines; a file has at most {FILE_LINES}"
        if path.suffix == ".py":
            for node in ast.walk(parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                    length = node.end_lineno - node.lineno + 1
                    if length > FUNCTION_LINES:
                        yield f"{_name(path)}:{node.lineno}: {node.name} has {length} lines; at most {FUNCTION_LINES}"


def package_size(package: Path = PACKAGE) -> Iterator[str]:
    lines = sum(code_lines(p.read_text(encoding="utf-8")) for p in package.rglob("*.py"))
    if lines > PACKAGE_LINES:
        yield f"the package has {lines} lines of code; at most {PACKAGE_LINES}"


def code_lines(text: str) -> int:
    """Lines with something to execute on them."""
    explained: set[int] = set()
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            explained.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - explained)


def rank(part: str) -> int:
    """Place of a part in ``RANKS``; KeyError for one nobody placed."""
    for place, parts in enumerate(RANKS):
        if part in parts:
            return place
    raise KeyError(part)


def imports(package: Path = PACKAGE) -> Iterator[str]:
    """Imports that go rightwards, or sideways, or to a package an install doesn't bring."""
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package).with_suffix("").as_posix()
        tree = parse(path.read_text(encoding="utf-8"))
        if module != "__init__":
            for node, target in _ours(tree, module):
                yield from _judge(path, node.lineno, module.split("/")[0], target)
        if not module.startswith(OPTIONAL_MODULES):
            yield from _foreign(path, tree)


def _ours(tree: ast.AST, module: str) -> Iterator[tuple[ast.stmt, str]]:
    """(statement, part) of every import from our own package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            names = ["headrace.a_relative_import"]
        elif isinstance(node, ast.ImportFrom) and node.module == "headrace":
            names = [f"headrace.{a.name}" for a in node.names if a.name != "__version__"]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        for name in names:
            if name.startswith("headrace."):
                yield node, name.split(".")[1]


def _judge(path: Path, line: int, part: str, target: str) -> Iterator[str]:
    try:
        here, there = rank(part), rank(target)
    except KeyError as error:
        yield f"{_name(path)}:{line}: {error} has no place in the order of imports (scripts/house.py, RANKS)"
        return
    if part != target and (there > here or (there == here and here > 0)):
        yield f"{_name(path)}:{line}: {part} imports {target}, which isn't to its left"


def _foreign(path: Path, tree: ast.Module) -> Iterator[str]:
    """Imports at the top of a module that aren't the standard library's, ours, or needed."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        else:
            continue
        for name in names:
            top = name.split(".")[0]
            if top not in sys.stdlib_module_names and top not in NEEDED and top != "headrace":
                yield f"{_name(path)}:{node.lineno}: imports {top} at the top; import it where it is used"


def environment(package: Path = PACKAGE) -> Iterator[str]:
    """Readers of the environment beside config.py, in Python and in C++."""
    for path in sorted(p for p in package.rglob("*") if p.suffix in CODE and p != package / "config.py"):
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".py":
            lines = [i for i, line in enumerate(text.splitlines(), 1) if "getenv" in line]
        else:
            lines = [
                node.lineno
                for node in ast.walk(parse(text))
                if (isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT)
                or (isinstance(node, ast.ImportFrom) and any(alias.name in ENVIRONMENT for alias in node.names))
            ]
        for line in lines:
            yield f"{_name(path)}:{line}: reads the environment; only config.py does"


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def everything() -> list[str]:
    sources = [p for p in PACKAGE.rglob("*") if p.suffix in CODE and p.suffix != ".py"]
    files = python_files("src", "tests", "scripts", "benchmarks") + sorted(sources)
    return [*sizes(files), *package_size(), *imports(), *environment()]


if __name__ == "__main__":
    breaches = everything()
    print("\n".join(breaches) or "house rules: kept")
    sys.exit(bool(breaches))
