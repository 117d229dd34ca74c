"""Divergence that the BLAS makes by itself, shown where near-ties are at hand: lab-mtp with an unembedding in pairs.

    python experiments/002_why_greedy_changes/paired.py [--prompts 1] [--tokens 96] [--apart 1e-6] [--folder COPY]

OpenBLAS rounds four rows otherwise than one, but the margins of lab-mtp are about 1 and the noise is 1e-5: nothing
flips. The copy differs in one matrix: the upper half of its `lm_head` repeats the lower half, each row `apart` (of its
size) away, so that every choice is a near-tie between an id and its twin. Blocks of the model, embedding and MTP head
are as they were; the noise is the machine's own. The model as it is runs beside it. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtplab import backend
from mtplab.errors import MtplabError, RequestError

ARMS = ("scripted3", "depth3")
APART = 1e-6


def write_copy(folder: Path, apart: float = APART) -> Path:
    """lab-mtp in `folder`, untied, id i + V/2 of its lm_head [V, D] (float32) a near-twin of id i. After `setup`."""
    import mlx.core as mx

    from mtplab.models import bundled

    source = bundled("lab-mtp")
    if folder.exists():
        raise RequestError(f"{folder} exists already; give a folder that is to be made")
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    weights = mx.load(str(source / "model.safetensors"))
    lower = mx.split(weights["model.embed_tokens.weight"].astype(mx.float32), 2)[0]
    noise = mx.random.normal(lower.shape, key=backend.key(0, "paired"))
    twins = lower + apart * mx.sqrt((lower * lower).mean(axis=1, keepdims=True)) * noise
    weights["lm_head.weight"] = mx.concatenate([lower, twins])
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def diagnose(
    model: str, *, prompts: int, tokens: int, arms: tuple[str, ...] = ARMS, corpora: tuple[str, ...] = ()
) -> dict[str, Any]:
    """What `mtplab diverge --model MODEL --dtype float32` finds in `tokens` of each prompt. `prompts`: per text."""
    from mtplab.trials.diverging import Wanted, diverge

    load = {"dtype": "float32"}
    return diverge(Wanted(model, arms, corpora, prompts=prompts, prompt_tokens=64, max_tokens=tokens, load=load))


def row(found: Mapping[str, Any]) -> str:
    """One line of the table; gap and noise are the largest gap that flipped and the noise of the first look."""
    gaps = [d["gap"] for d in found["divergences"]]
    shown = ["-" if v is None else f"{v:.2g}" for v in (max(gaps, default=None), found["noise"])]
    why = found["explained"]["sentence"] if found["explained"] else "-"
    cells = [found["model"]["model"], found["compared"], len(gaps), *shown, found["first_module"] or "-"]
    return "| " + " | ".join(map(str, [*cells, why, found["verdict"]])) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1, help="per text [1]")
    parser.add_argument("--tokens", type=int, default=96, help="per prompt [96]")
    parser.add_argument("--apart", type=float, default=APART, help=f"distance of the twins, of a row's size [{APART}]")
    parser.add_argument("--folder", type=Path, help="keep the copy there [a temporary folder]")
    args = parser.parse_args()
    try:
        info = backend.setup()
        print(f"{info.name} ({info.kind}), {info.core or 'core unknown'}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as made:
            copy = write_copy(args.folder or Path(made) / "lab-mtp-paired", args.apart)
            print("| model | compared | divergences | largest gap | noise | first module | explained by | verdict |")
            print("|---|---|---|---|---|---|---|---|")
            for model in ("lab-mtp", str(copy)):
                print(row(diagnose(model, prompts=args.prompts, tokens=args.tokens)), flush=True)
    except MtplabError as error:
        print(error, file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
