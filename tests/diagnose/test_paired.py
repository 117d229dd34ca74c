"""Divergence that a BLAS makes by itself is found, called numeric, and explained by the modules it comes from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHILD = """
import json, sys
from pathlib import Path
from mtplab import backend
if backend.setup().kind != "openblas":
    print("null")
    sys.exit()
sys.path.insert(0, "experiments/002_why_greedy_changes")
import paired
copy = paired.write_copy(Path(sys.argv[1]))
print(json.dumps(paired.diagnose(str(copy), arms=("scripted3",), corpora=("c",), prompts=1, tokens=16)))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="OpenBLAS is loaded on Linux only")
def test_natural_divergence_under_openblas_is_numeric_and_explained(tmp_path):
    environment = os.environ | {"MTPLAB_BLAS": "auto", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CHILD, str(tmp_path / "copy")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    if found is None:
        pytest.skip("OpenBLAS cannot be had here")
    assert found["verdict"] == "numeric" and found["divergences"] and found["simulated"] is None
    assert 0 < found["noise"] < 1e-3 and found["gap"] <= 2 * found["noise"]
    assert found["first_module"].startswith("model.layers.")
    assert found["controls"]["baseline_reproducible"] and found["controls"]["equal_to_the_same_blocks"]
    assert found["explained_by"] and found["explained"]["explained"] == found["explained"]["total"], "not all vanish"
