"""The trunk's own continuations, for training the head on the text it will draft for.

    python sample.py --work DIR --model DIR [--rows 1536]

Rows of 256 tokens: 64 of a training text, then 192 of the trunk's own, a third of them greedy, the rest at
temperature 0.8. The prompts alternate novel and C. Written to DIR/samples.npy.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from mtplab import backend

BATCH, PROMPT, LENGTH = 48, 64, 256


def continue_batch(target, prompts: np.ndarray, greedy_rows: int, seed: int) -> np.ndarray:
    """prompts: [B, PROMPT] -> [B, LENGTH]; the first `greedy_rows` greedily, the others sampled."""
    import mlx.core as mx

    cache = target.new_cache().layers
    key, tokens, out = mx.random.key(seed), mx.array(prompts.astype(np.int32)), [prompts]
    for _ in range(LENGTH - PROMPT):
        logits = target.model(tokens, cache=cache)[:, -1]
        key, now = mx.random.split(key)
        picked = mx.random.categorical(logits / 0.8, key=now)
        picked[:greedy_rows] = mx.argmax(logits[:greedy_rows], axis=-1).astype(picked.dtype)
        mx.eval(picked)
        tokens = picked[:, None]
        out.append(np.array(picked)[:, None])
    return np.concatenate(out, axis=1).astype(np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1536)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    backend.setup()
    from train import Batches

    from mtplab.models import load_target

    target, data = load_target(args.model, head="none").target, Batches(args.work, "train", args.seed + 1000)
    began, rows = time.time(), []
    while len(rows) * BATCH < args.rows:
        prompts = data.draw(BATCH, PROMPT).numpy()
        # Novel and C alternate, so a prefix of the batch holds both kinds.
        rows.append(continue_batch(target, prompts, BATCH // 3, args.seed * 1_000 + len(rows)))
        print(f"{len(rows) * BATCH} rows, {time.time() - began:.0f} s", flush=True)
        np.save(args.work / "samples.npy", np.concatenate(rows))


if __name__ == "__main__":
    main()
