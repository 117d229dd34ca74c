"""How often does noise of a given size flip a greedy token? Simulated noise in every linear of blocks, on lab-mtp.

    python experiments/002_why_greedy_changes/noise.py [--prompts 2] [--tokens 128]

The teacher-forced arm is re-joined after every flip, so one run counts all of them. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from mtplab import backend

SIZES = ("1e-6", "1e-5", "1e-4", "1e-3", "3e-3", "1e-2", "3e-2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lab-mtp")
    parser.add_argument("--prompts", type=int, default=2, help="per text [2]")
    parser.add_argument("--tokens", type=int, default=128, help="per prompt [128]")
    args = parser.parse_args()
    backend.setup("reference")
    from mtplab.trials.diverging import Wanted, diverge

    wanted = Wanted(
        args.model, ("scripted3",), prompts=args.prompts, prompt_tokens=64, max_tokens=args.tokens, explain=False
    )
    print("| noise | compared | divergences | per 1,000 | noise of the logits | largest gap that flipped | verdict |")
    print("|---|---|---|---|---|---|---|")
    for size in SIZES:
        found = diverge(replace(wanted, simulate=f"noise:{size}@*"))
        arm, gaps = found["arms"][0], [d["gap"] for d in found["divergences"]]
        rate, most = f"{arm['divergence_per_1k']:.2f}", f"{max(gaps):.2g}" if gaps else "-"
        rows = found["rows_that_differ"]["largest"]
        shown = "-" if rows is None else f"{rows:.2g}"
        print(
            f"| {size} | {arm['compared']} | {len(gaps)} | {rate} | {shown} | {most} | {found['verdict']} |", flush=True
        )


if __name__ == "__main__":
    main()
