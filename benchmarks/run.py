"""Every benchmark, one after the other; the last line is one JSON document with all of theirs.

    python benchmarks/run.py                               # lab-mtp, about 25 minutes on a quiet machine of 2 cores
    python benchmarks/run.py --quick                       # 2 short rounds of each: do they run?
    python benchmarks/run.py --smollm2 ~/.cache/mtplab-benchmarks   # and SmolLM2-135M against mlx-lm

A benchmark that fails does not stop the others; the exit code is the highest of theirs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPTS = ("baseline_vs_mlx_lm", "loop_cost", "predicted", "exact_verify", "memory")
QUICK = {
    "baseline_vs_mlx_lm": ["--rounds", "2", "--prompts", "1", "--max-tokens", "32"],
    "loop_cost": ["--rounds", "2", "--prompts", "1", "--max-tokens", "32"],
    "predicted": ["--rounds", "2", "--prompts", "1", "--max-tokens", "32"],
    "exact_verify": ["--rounds", "2", "--prompts", "1", "--max-tokens", "32"],
    "memory": ["--max-tokens", "64", "--passes", "10", "40"],
}
SMOLLM2 = ["--rounds", "5", "--prompts", "2", "--max-tokens", "128"]


def run(script: str, flags: list[str]) -> tuple[int, dict | None]:
    """(exit code, its document or None); its table goes to stdout, its progress to stderr."""
    print(f"== {script} {' '.join(flags)}", file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, str(HERE / f"{script}.py"), *flags], stdout=subprocess.PIPE, text=True)
    *table, last = done.stdout.splitlines() or [""]
    try:
        document = json.loads(last)
    except ValueError:
        table, document = [*table, last], None
    print("\n".join(table), flush=True)
    return done.returncode, document


def jobs(args: argparse.Namespace) -> list[tuple[str, list[str]]]:
    common = ["--model", args.model]
    out = [(s, common + (QUICK[s] if args.quick else [])) for s in SCRIPTS]
    if args.smollm2 is not None:
        folder = subprocess.run(
            [sys.executable, str(HERE / "smollm2.py"), args.smollm2], capture_output=True, text=True
        )
        if folder.returncode:
            sys.exit(folder.stderr.strip())
        flags = QUICK["baseline_vs_mlx_lm"] if args.quick else SMOLLM2
        out.insert(1, ("baseline_vs_mlx_lm", ["--model", folder.stdout.splitlines()[-1], *flags]))
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lab-mtp", help="a model with an MTP head (default: lab-mtp)")
    parser.add_argument("--smollm2", metavar="FOLDER", help="also measure SmolLM2-135M, converted into this folder")
    parser.add_argument("--quick", action="store_true", help="2 short rounds of each")
    args = parser.parse_args()
    results = [run(script, flags) for script, flags in jobs(args)]
    documents = [d for _, d in results if d is not None]
    missed = [f"{d['benchmark']}: {r['name']}" for d in documents for r in d["ratios"] if r["met"] is False]
    print(f"{len(missed)} wanted ratios missed" + "".join(f"\n  {m}" for m in missed))
    print(json.dumps({"schema": 1, "benchmarks": documents, "missed": missed}, allow_nan=False))
    return max(code for code, _ in results)


if __name__ == "__main__":
    raise SystemExit(main())
