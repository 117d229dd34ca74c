"""The converted model against transformers' reading of the same GGUF, in float32.

    python check.py --gguf model.gguf --model FOLDER

transformers needs the packages gguf and accelerate for this; FOLDER is made by
`mtplab convert model.gguf FOLDER --dtype float32`.
The last line is one JSON document: the largest difference of logits per text, and whether the tokenizers agree.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from mtplab import backend

TEXTS = (
    "The old lighthouse keeper climbed the stairs and",
    "static int compare(const void *a, const void *b){\n\treturn *(int*)a - *(int*)b;\n}\n",
    "In 1984, 37 of 1250 ships were lost; 2% of the crews survived.",
    "Caf\u00e9 \u2014 na\u00efve \U0001f40b",
)


def theirs(gguf: Path) -> tuple[list[list[int]], list[np.ndarray]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    ids = [tokenizer(t)["input_ids"] for t in TEXTS]
    with torch.no_grad():
        return ids, [model(torch.tensor([i])).logits[0].numpy() for i in ids]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    args = parser.parse_args()
    backend.setup()
    import mlx.core as mx

    from mtplab.models import load_target

    loaded = load_target(args.model, head="none", dtype="float32")
    ids, logits = theirs(args.gguf)
    rows = []
    for text, tokens, wanted in zip(TEXTS, ids, logits, strict=True):
        got = np.array(loaded.target.forward(mx.array(tokens), loaded.target.new_cache()).logits)
        rows.append(
            {
                "text": text,
                "tokens": len(tokens),
                "same_tokens": loaded.tokenizer.encode(text) == tokens,
                "largest_difference": float(np.abs(got - wanted).max()),
                "same_first_choice": float((got.argmax(-1) == wanted.argmax(-1)).mean()),
                "logit_std": float(wanted.std()),
            }
        )
        print(rows[-1])
    print(json.dumps({"largest_difference": max(r["largest_difference"] for r in rows), "rows": rows}))


if __name__ == "__main__":
    main()
