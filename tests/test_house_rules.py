"""The house rules are kept, and their checks find what they are for."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import headrace

ROOT = Path(__file__).parent.parent


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


house, docs = script("house"), script("docs")


def test_the_rules_are_kept() -> None:
    assert house.everything() == []


def test_generated_documents_are_up_to_date() -> None:
    assert docs.behind() == []


def test_every_option_is_explained() -> None:
    text = docs.command_line()
    for line in text.splitlines():
        if line.startswith("| `"):
            assert line.split(" | ")[1].strip(" |"), f"no help: {line}"
    for command in docs.cli.COMMANDS:
        assert f"\n## headrace {command}\n" in text


def test_the_version_stands_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == headrace.__version__


def test_the_interface_named_in_the_readme_is_there() -> None:
    for name in headrace.__all__:
        assert getattr(headrace, name) is not None
    with pytest.raises(AttributeError):
        headrace.__getattr__("nothing")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for folder in ("run", "model", "formats", "kernels", "cli"):
        (tmp_path / folder).mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("place", "line", "bad"),
    [
        ("model/a.py", "from headrace.run.head import Head", True),
        ("model/a.py", "def f():\n    import headrace.cli.main", True),
        ("model/a.py", "from headrace import engine", True),
        ("formats/a.py", "from headrace.kernels.device import Device", True),
        ("model/a.py", "from .spec import Spec", True),
        ("model/a.py", "import torch", True),
        ("model/a.py", "from nowhere_placed import x", True),
        ("model/a.py", "from headrace.nowhere import x", True),
        ("model/a.py", "def f():\n    import torch", False),
        ("kernels/torch.py", "import torch", False),
        ("model/a.py", "from headrace.errors import BadFile\nfrom headrace import __version__\nimport numpy", False),
        ("run/a.py", "from headrace.model.spec import Spec\nfrom headrace.run.head import Head", False),
        ("cli/a.py", "from headrace import config, engine", False),
    ],
)
def test_imports_that_go_the_wrong_way_are_found(package: Path, place: str, line: str, bad: bool) -> None:
    (package / place).write_text(line + "\n")
    assert bool(list(house.imports(package))) is bad


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        ("import os\nos.environ['A']", True),
        ("from os import getenv", True),
        ("import os\nos.getpid()", False),
    ],
)
def test_readers_of_the_environment_are_found(package: Path, line: str, bad: bool) -> None:
    (package / "run" / "a.py").write_text(line + "\n")
    (package / "config.py").write_text("import os\nos.environ\n")
    assert bool(list(house.environment(package))) is bad


def test_long_files_and_functions_are_found(tmp_path: Path) -> None:
    body = "    x = 1\n"
    (tmp_path / "good.py").write_text("def f():\n" + body * (house.FUNCTION_LINES - 1))
    (tmp_path / "long.py").write_text("def f():\n" + body * house.FUNCTION_LINES)
    (tmp_path / "file.py").write_text("x = 1\n" * (house.FILE_LINES + 1))
    found = list(house.sizes(sorted(tmp_path.glob("*.py"))))
    assert len(found) == 2 and "file.py" in found[0] and "long.py:1: f" in found[1]


def test_a_package_that_is_too_long_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n" * (house.PACKAGE_LINES + 1))
    assert list(house.package_size(tmp_path))
    assert house.code_lines('"""Doc\nstring."""\n\n# why\nx = [\n    1,  # one\n]\ny = """a\nb"""\n') == 5


def test_figures_come_from_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    medians = {"headrace_decode": 3.0, "llamacpp_decode": 2.0, "headrace_prefill": 9.0, "llamacpp_prefill": 3.0}
    row = (
        '{"results": {"m": [{"threads": 1, "decode_ratio": 1.5, "prefill_ratio": 3.0, "weights_read_gb_s": 1.2,'
        f' "share_of_bandwidth": 0.5, "medians": {str(medians).replace(chr(39), chr(34))}}}]}}}}'
    )
    (tmp_path / "vs_llamacpp.json").write_text(row)
    monkeypatch.setattr(docs, "RESULTS", tmp_path)
    made = docs.figures("a\n<!-- figures: vs_llamacpp -->\nold\n<!-- end -->\nb")
    assert "| m | 1 | 3.0 / 2.0 | 1.50 | 9.0 / 3.0 | 3.00 | 1.2 GB/s | 50% |" in made and "old" not in made
    assert docs.figures(made) == made


def test_the_package_needs_no_optional_library() -> None:
    """Importing the command line brings neither numpy nor anything optional."""
    import subprocess

    code = (
        "import sys; import headrace, headrace.cli.main as m; m.parser(()); "
        "bad = {'numpy', 'torch', 'transformers', 'gguf', 'tokenizers', 'jinja2', 'mpi4py', 'highspy', 'asyncio'}; "
        "print(sorted(bad & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
