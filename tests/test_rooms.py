"""The house's order: an import points to a room below, never up, never sideways; and no file outgrows a reading.

Read from the `ast` of every file, so that an import inside a function counts like any other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# From the top. `kernels` is the folder beside the package, installed as mtplab.kernels; `errors` is what all may raise.
ORDER = ("cli", "report", "train", "trials", "diagnose", "decode", "models", "backend", "kernels", "records", "errors")
# Not rooms: the package itself (its version) and its data files; open to all, and they import no room.
OPEN = ("", "data")
FORBIDDEN = {"records": ("mlx", "mlx_lm", "torch", "transformers"), "errors": ("mlx", "numpy", "scipy")}
CODE = ("mtplab", "kernels", "benchmarks", "experiments", "tests")
LINES = 400


def sources(root: Path, *folders: str) -> list[Path]:
    return sorted(p for f in folders for p in (root / f).rglob("*.py"))


def module_of(path: Path, root: Path) -> str:
    """The dotted name a file is imported by; top-level kernels/ is mtplab.kernels."""
    parts = path.relative_to(root).with_suffix("").parts
    parts = ("mtplab", *parts) if parts[0] == "kernels" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a file imports: absolute, relative, and import_module of a literal."""
    module = module_of(path, root).split(".")
    package = module if path.name == "__init__.py" else module[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{stem}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            if name in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)


def room_of(module: str) -> str | None:
    """The room of a dotted name inside the package, None outside it."""
    parts = module.split(".")
    if parts[0] != "mtplab":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in (*ORDER, *OPEN) else ""


def complaints(root: Path) -> list[str]:
    """Every import that breaks the order, as `file:line says what`."""
    found = []
    for path in sources(root, "mtplab", "kernels"):
        here = room_of(module_of(path, root))
        for line, name in imports(path, root):
            there, where = room_of(name), f"{path.relative_to(root)}:{line}"
            if name.split(".")[0] == "kernels":
                found.append(f"{where} imports bare `kernels`, another distribution's name; write mtplab.kernels")
            if any(name == f or name.startswith(f + ".") for f in FORBIDDEN.get(here, ())):
                found.append(f"{where} imports {name} in {here}")
            if there in ORDER and here in ORDER and here != there and ORDER.index(there) < ORDER.index(here):
                found.append(f"{where} imports upwards, from {here} to {there}")
            if there in ORDER and here in OPEN and path.name == "__init__.py":
                found.append(f"{where} imports {there} into the package itself, which every room imports")
    return found


def test_imports_point_downwards():
    assert complaints(ROOT) == []


def test_every_folder_of_the_package_has_a_place_in_the_order():
    folders = {p.name for p in (ROOT / "mtplab").iterdir() if p.is_dir() and any(p.rglob("*.py"))}
    assert folders <= {*ORDER, *OPEN}


@pytest.mark.parametrize("path", sources(ROOT, *CODE), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_outgrows_a_reading(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LINES


@pytest.mark.parametrize(
    ("file", "code", "expected"),
    [
        ("mtplab/decode/loop.py", "import mtplab.trials.plan", "from decode to trials"),
        ("mtplab/decode/loop.py", "def f():\n    from mtplab.cli import main", "loop.py:2 imports upwards"),
        ("mtplab/decode/drafters/x.py", "from ...report import page", "from decode to report"),
        ("mtplab/decode/__init__.py", "from .. import trials", "from decode to trials"),
        ("mtplab/models/x.py", "from mtplab import decode", "from models to decode"),
        ("mtplab/backend/x.py", "import importlib\nimportlib.import_module('mtplab.models')", "from backend to models"),
        ("mtplab/records/x.py", "def f():\n    import mlx.core as mx", "imports mlx.core in records"),
        ("mtplab/records/x.py", "from mlx import core", "imports mlx.core in records"),
        ("mtplab/errors.py", "from mtplab.records import types", "from errors to records"),
        ("mtplab/__init__.py", "from mtplab.backend import blas", "into the package itself"),
        ("mtplab/backend/x.py", "import kernels", "bare `kernels`"),
        ("kernels/accept.py", "from mtplab.backend import keys", "from kernels to backend"),
        ("mtplab/cli/x.py", "from mtplab.records import types\nfrom mtplab import __version__", None),
        ("mtplab/decode/x.py", "from mtplab.decode import y\nfrom . import z\nfrom mtplab.kernels import accept", None),
        ("mtplab/records/x.py", "import numpy\nfrom mtplab.errors import RequestError", None),
    ],
)
def test_the_check_finds_what_it_is_for(tmp_path, file, code, expected):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(code, encoding="utf-8")
    found = complaints(tmp_path)
    assert found == [] if expected is None else len(found) == 1 and expected in found[0]
