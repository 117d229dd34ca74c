"""Reading records must work where there is no MLX, and must stay cheap."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("mlx", "torch", "scipy", "matplotlib", "transformers")


def loaded_after(code: str) -> set[str]:
    """Which heavy packages a fresh process has loaded after `code`."""
    script = f"import sys\n{code}\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_importing_the_package_and_its_modules_loads_nothing_heavy():
    code = "import mtplab.records\nfrom mtplab.records import dialects, metrics, statistics, summary, types"
    assert loaded_after(code) == set()


def test_a_whole_summary_needs_no_mlx():
    code = """
from mtplab.records import Prefill, Request, Verify, summarize
p = Prefill(3, 0, 512, 1, 1, 5, None, 0, 10)
v = Verify(0, 1, 1, 1, 1, 2, None, 3, 5, (6,), (6, 7), 10, 20)
summarize({"baseline": [Request("a", "novel", p, (v,), "cap")]})
"""
    assert "mlx" not in loaded_after(code)


def test_a_process_in_which_mlx_cannot_be_imported_still_reads_records():
    assert loaded_after("import sys\nsys.modules['mlx'] = None\nfrom mtplab.records import summary") <= {"mlx"}


def test_the_package_lists_what_it_offers_and_names_what_it_does_not():
    import mtplab.records as records

    assert all(getattr(records, name) is not None for name in records.__all__)
    with pytest.raises(AttributeError, match="speed_of_light"):
        _ = records.speed_of_light
