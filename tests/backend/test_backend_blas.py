"""The BLAS choice, always in a process of its own: what is loaded with RTLD_GLOBAL stays for good."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtplab.backend import openblas

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a BLAS is chosen on Linux only")

ACTIVATE = """
import dataclasses, json, sys
from mtplab.backend import blas
from mtplab.errors import RequestError
try:
    print(json.dumps(dataclasses.asdict(blas.activate())))
except RequestError as error:
    print(json.dumps({"error": str(error), "code": error.code}))
"""
SPEED = """
import json, time
from mtplab import backend
info = backend.setup()
import mlx.core as mx
a, b = mx.random.normal((1024, 1024)), mx.random.normal((1024, 1024))
backend.fence(a, b)
best = 9e9
for _ in range(4):
    start = time.perf_counter()
    backend.fence(a @ b)
    best = min(best, time.perf_counter() - start)
x, w = mx.random.normal((8, 512)), mx.random.normal((512, 256))
wide = x @ w
rows = mx.concatenate([x[i : i + 1] @ w for i in range(8)])
loaded = "openblas" in open("/proc/self/maps").read()
print(json.dumps({"kind": info.kind, "s": best, "differs": (wide != rows).sum().item(), "loaded": loaded}))
"""


def start(code: str, **environ: str) -> subprocess.Popen:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MTPLAB_") and k != "LD_PRELOAD"}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=clean | {"PYTHONPATH": str(ROOT)} | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def child(code: str, **environ: str) -> dict:
    process = start(code, **environ)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """A cache folder that holds a good copy."""
    folder = tmp_path_factory.mktemp("cache")
    info = child(ACTIVATE, XDG_CACHE_HOME=str(folder))
    assert info["kind"] == "openblas", info["notice"]
    return folder


@pytest.fixture(scope="module")
def library(cache) -> Path:
    return next(cache.rglob("*.so"))


def test_openblas_is_what_mlx_multiplies_with_and_reference_stays_reference(cache):
    fast = child(SPEED, XDG_CACHE_HOME=str(cache))
    slow = child(SPEED, XDG_CACHE_HOME=str(cache), MTPLAB_BLAS="reference")
    assert (fast["kind"], slow["kind"]) == ("openblas", "reference")
    assert fast["loaded"] and not slow["loaded"]
    assert slow["s"] > 2.5 * fast["s"]
    # The oracle that equality tests stand on: with the reference BLAS a row does not depend on its neighbours.
    assert slow["differs"] == 0


def test_record_says_name_version_path_and_one_thread(cache, library):
    info = child(ACTIVATE, XDG_CACHE_HOME=str(cache))
    assert info["name"] == "OpenBLAS" and info["version"][0].isdigit() and info["core"]
    assert Path(info["path"]) == library
    assert info["threads"] == 1 and info["notice"] is None


def test_threads_are_set_and_checked(cache):
    two = child(ACTIVATE, XDG_CACHE_HOME=str(cache), MTPLAB_BLAS_THREADS="2")
    assert two["threads"] == 2
    for bad in ("0", "many", "-1", "1.5"):
        refused = child(ACTIVATE, XDG_CACHE_HOME=str(cache), MTPLAB_BLAS_THREADS=bad)
        assert repr(bad) in refused["error"] and refused["code"] == 2


@pytest.mark.parametrize("harm", ["truncated", "one byte"])
def test_a_broken_cached_copy_is_rebuilt_not_loaded(tmp_path, cache, library, harm):
    folder = tmp_path / "mtplab"
    folder.mkdir()
    copy = folder / library.name
    good = library.read_bytes()
    half = len(good) // 2
    copy.write_bytes(good[:half] if harm == "truncated" else good[:half] + bytes([good[half] ^ 1]) + good[half + 1 :])
    info = child(ACTIVATE, XDG_CACHE_HOME=str(tmp_path))
    assert info["kind"] == "openblas"
    assert Path(info["path"]).read_bytes() == good
    assert [p.name for p in folder.iterdir()] == [library.name]


def test_first_starts_at_once_all_succeed(tmp_path):
    processes = [start(ACTIVATE, XDG_CACHE_HOME=str(tmp_path)) for _ in range(3)]
    infos = [json.loads(p.communicate(timeout=120)[0]) for p in processes]
    assert [i["kind"] for i in infos] == ["openblas"] * 3
    # One copy, and nothing half-made beside it.
    assert len(list((tmp_path / "mtplab").iterdir())) == 1


def test_what_a_killed_build_left_is_swept(tmp_path):
    old = tmp_path / "mtplab" / ".build-killed"
    old.mkdir(parents=True)
    (old / "copy.so").write_bytes(b"half")
    os.utime(old, (0, 0))
    child(ACTIVATE, XDG_CACHE_HOME=str(tmp_path))
    assert not old.exists()


def test_unusable_cache_folder_falls_back_with_one_line(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    info = child(ACTIVATE, XDG_CACHE_HOME=str(blocked))
    assert info["kind"] == "reference"
    assert str(blocked) in info["notice"] and "\n" not in info["notice"]


def test_full_disk_leaves_nothing_half_made(tmp_path, monkeypatch):
    def fill(source: Path, target: Path) -> None:
        Path(target).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(openblas.shutil, "copyfile", fill)
    with pytest.raises(openblas.Unavailable, match="No space left"):
        openblas.prepare()
    assert list((tmp_path / "mtplab").iterdir()) == []


def test_no_patchelf_falls_back_and_says_so(tmp_path):
    code = "from mtplab.backend import openblas\nopenblas._patchelf_candidates = lambda: iter(())\n" + ACTIVATE
    info = child(code, XDG_CACHE_HOME=str(tmp_path))
    assert info["kind"] == "reference" and "patchelf" in info["notice"]
    assert list(tmp_path.rglob("*.so")) == []


def test_patchelf_is_found_without_path(tmp_path):
    info = child(ACTIVATE, XDG_CACHE_HOME=str(tmp_path), PATH="/nowhere")
    assert info["kind"] == "openblas", info["notice"]


def test_custom_library_is_used(cache, library):
    info = child(ACTIVATE, MTPLAB_BLAS=str(library))
    assert (info["kind"], info["path"], info["threads"]) == ("custom", str(library), 1)


def test_impossible_choices_are_refused_with_the_value(tmp_path, library):
    text, cut = tmp_path / "text.so", tmp_path / "cut.so"
    text.write_text("hello")
    cut.write_bytes(library.read_bytes()[:100_000])
    for choice, reason in (
        ("/nonexistent", "no file"),
        (str(tmp_path), "no file"),
        (str(text), "not an ELF file"),
        (str(cut), "truncated"),
        ("openblas", "no file"),
    ):
        refused = child(ACTIVATE, MTPLAB_BLAS=choice)
        assert choice in refused["error"] and reason in refused["error"] and refused["code"] == 2
        assert "\n" not in refused["error"]


def test_library_without_cblas_sgemm_never_enters_the_process():
    # The wheel's own library has the symbol only with a prefix.
    code = """
import importlib.util, json, os
wheel = importlib.util.find_spec("scipy_openblas32").submodule_search_locations[0] + "/lib/libscipy_openblas.so"
os.environ["MTPLAB_BLAS"] = wheel
from mtplab.backend import blas
from mtplab.errors import RequestError
try:
    blas.activate()
except RequestError as error:
    print(json.dumps({"error": str(error), "loaded": "openblas" in open("/proc/self/maps").read()}))
"""
    refused = child(code)
    assert "cblas_sgemm" in refused["error"] and not refused["loaded"]


def test_preloaded_library_is_reported_and_reference_refused(library):
    auto = child(ACTIVATE, LD_PRELOAD=str(library))
    assert auto["kind"] == "custom" and auto["path"] == str(library) and auto["notice"]
    refused = child(ACTIVATE, LD_PRELOAD=str(library), MTPLAB_BLAS="reference")
    assert "LD_PRELOAD" in refused["error"]


SECOND = """
import json, sys
{first}
from mtplab.backend import blas
from mtplab.errors import RequestError
{again}
try:
    print(json.dumps({{"kind": (i := blas.activate({choice!r})).kind, "notice": i.notice}}))
except RequestError as error:
    print(json.dumps({{"error": str(error)}}))
"""


def second(choice: str | None, *, first: str = "", again: str = "", cache: Path) -> dict:
    return child(SECOND.format(first=first, again=again, choice=choice), XDG_CACHE_HOME=str(cache))


def test_after_mlx_is_imported_only_what_is_true_can_be_chosen(cache, library):
    late = {"first": "import mlx.core", "cache": cache}
    assert "already imported" in second(str(library), **late)["error"]
    assert second("reference", **late) == {"kind": "reference", "notice": None}
    auto = second("auto", **late)
    assert auto["kind"] == "reference" and "before mtplab" in auto["notice"]


def test_a_second_call_returns_the_first_choice_or_refuses_another(cache):
    assert second(None, again="blas.activate('reference')", cache=cache)["kind"] == "reference"
    assert second("reference", again="blas.activate('reference')", cache=cache)["kind"] == "reference"
    assert second("auto", again="blas.activate()", cache=cache)["kind"] == "openblas"
    assert "new process" in second("reference", again="blas.activate('auto')", cache=cache)["error"]
    assert "new process" in second("auto", again="blas.activate('reference')", cache=cache)["error"]


def test_setup_turns_compile_off_on_the_cpu(tmp_path, cache):
    # A compiler that only notes that it was asked for.
    log, compiler = tmp_path / "asked", tmp_path / "g++"
    compiler.write_text(f"#!/bin/sh\necho asked >> {log}\n")
    compiler.chmod(0o755)
    code = """
import json
from mtplab import backend
before = backend.compile_on()
backend.setup()
import mlx.core as mx
value = mx.compile(lambda x, y: mx.exp(x * 0) * y + mx.abs(x - 5) / y)(mx.ones(3), mx.ones(3)).sum().item()
print(json.dumps({"before": before, "after": backend.compile_on(), "value": value, "device": backend.device()}))
"""
    got = child(code, XDG_CACHE_HOME=str(cache), TMPDIR=str(tmp_path), PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert got == {"before": None, "after": False, "value": 15.0, "device": "cpu"}
    assert not log.exists()


def test_importing_the_room_imports_nothing_heavy():
    code = """
import json, sys
import mtplab.backend, mtplab.backend.doctor, mtplab.kernels.accept
heavy = {"mlx", "numpy", "scipy", "torch", "transformers", "scipy_openblas32"}
print(json.dumps({"heavy": sorted(heavy & {m.partition(".")[0] for m in sys.modules})}))
"""
    assert child(code) == {"heavy": []}
