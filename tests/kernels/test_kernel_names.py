"""`mtplab.kernels` is found from a checkout, a wheel and an editable install; a bare `kernels` is never ours."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = "import mtplab.kernels.accept as a; print(a.__file__)"
BARE = """
try:
    import kernels
except ModuleNotFoundError as error:
    print("not found", error.name)
else:
    print("found", kernels.__file__)
"""


def python(code: str, *paths: Path | str, cwd: Path = ROOT, flags: Sequence[str] = ()) -> str:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if paths:
        env["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    command = [sys.executable, *flags, "-c", code]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    """A site folder with another distribution that is called `kernels`."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "kernels").mkdir()
    (folder / "kernels" / "__init__.py").write_text("from .hub import get_kernel\n")
    (folder / "kernels" / "hub.py").write_text("def get_kernel():\n    return 'theirs'\n")
    info = folder / "kernels-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.1.0\n")
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """`wheel/` and `editable/`, built from a copy of the sources by the build backend itself."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    left_out = shutil.ignore_patterns(".*", "build", "*.egg-info", "runs", "data", "experiments", "__pycache__")
    shutil.copytree(ROOT, source, ignore=left_out)
    (source / "README.md").touch()
    code = "import setuptools.build_meta as b, sys; getattr(b, sys.argv[1])(sys.argv[2])"
    for kind in ("wheel", "editable"):
        out = folder / f"{kind}.packed"
        out.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", code, f"build_{kind}", str(out)], cwd=source, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        zipfile.ZipFile(next(out.glob("*.whl"))).extractall(folder / kind)
    return folder


def test_from_the_repository_root_and_from_pythonpath(tmp_path):
    wanted = str(ROOT / "kernels" / "accept" / "__init__.py")
    assert python(OURS) == wanted
    assert python(OURS, ".") == wanted
    assert python(OURS, ROOT, cwd=tmp_path) == wanted


def test_a_bare_import_never_finds_ours(tmp_path):
    assert python(BARE) == "not found kernels"
    assert python(BARE, ROOT, cwd=tmp_path) == "not found kernels"
    assert python("import mtplab.kernels.accept\n" + BARE) == "not found kernels"
    deep = BARE.replace("import kernels", "import kernels.accept")
    assert python(deep) == "not found kernels"


def test_the_real_distribution_is_found_from_the_repository_root(real, tmp_path):
    code = "import kernels, kernels.hub; print(kernels.get_kernel(), kernels.__file__)"
    for paths, cwd in (((real,), ROOT), ((ROOT, real), tmp_path), ((real, ROOT), tmp_path)):
        assert python(code, *paths, cwd=cwd) == f"theirs {real / 'kernels' / '__init__.py'}"
    # Another checkout on the path is not the distribution either.
    other = tmp_path / "other" / "kernels"
    shutil.copytree(ROOT / "kernels", other)
    assert python(BARE, other.parent) == "not found kernels"
    assert python(code, other.parent, real).startswith("theirs")


TRANSFORMERS = """
from transformers.utils import is_kernels_available
print(is_kernels_available())
"""


def test_transformers_does_not_take_ours_for_the_distribution():
    pytest.importorskip("transformers")
    assert python(TRANSFORMERS + BARE).splitlines() == ["False", "not found kernels"]


def test_wheel_holds_the_kernels_inside_mtplab_only(built, tmp_path):
    wheel = built / "wheel"
    assert sorted(p.name for p in wheel.iterdir() if p.suffix != ".dist-info") == ["mtplab"]
    assert python(OURS, wheel, cwd=tmp_path) == str(wheel / "mtplab" / "kernels" / "accept" / "__init__.py")
    assert python(BARE, wheel, cwd=tmp_path) == "not found kernels"
    assert python(OURS + "\n" + BARE, wheel, cwd=built).endswith("not found kernels")


def test_installed_beside_the_real_distribution_each_keeps_its_name(built, real, tmp_path):
    site = tmp_path / "site"
    shutil.copytree(built / "wheel", site)
    shutil.copytree(real, site, dirs_exist_ok=True)
    code = OURS + "; import mtplab.kernels as m, kernels; print(len(m.__path__), kernels.get_kernel())"
    assert python(code, site, cwd=tmp_path).splitlines()[1] == "1 theirs"


def test_editable_install_finds_the_checkout(built, tmp_path):
    # -S: mtplab may be installed in the environment of the tests as well, and its finder has the same name.
    code = f"import site; site.addsitedir({str(built / 'editable')!r})\n{OURS}\n{BARE}"
    found, bare = python(code, cwd=tmp_path, flags=["-S"]).splitlines()
    assert found == str(built / "source" / "kernels" / "accept" / "__init__.py")
    assert bare == "not found kernels"


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_and_kernel_is_listed_for_installation():
    settings = pyproject()["tool"]["setuptools"]
    inside = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "mtplab").rglob("__init__.py")}
    kernels = {p.parent.name for p in (ROOT / "kernels").glob("*/__init__.py")}
    assert set(settings["packages"]) == inside | {f"mtplab.kernels.{name}" for name in kernels}
    folders = {f"mtplab.kernels.{name}": f"kernels/{name}" for name in kernels}
    assert settings["package-dir"] == {"mtplab": "mtplab"} | folders


def test_constraints_pin_every_direct_dependency_to_a_plain_version():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    pins = dict(line.split("==") for line in lines)
    assert pins["torch"] == "2.13.0"
    for version in pins.values():
        # A local version such as +cpu exists on some indexes only.
        assert re.fullmatch(r"\d+(\.\d+)+", version), version
    project = pyproject()["project"]
    asked = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    names = {re.split(r"[\[><=;\s]", line)[0] for line in asked}
    assert names <= set(pins)
