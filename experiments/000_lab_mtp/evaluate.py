"""The figures of lab-mtp's model card: `python evaluate.py --work DIR --model DIR`.

Held-out perplexity per text, `match` and `overlap` of the head per depth on held-out text and on the trunk's own
greedy and sampled continuations of the bundled prompts, and sample text. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np

from mtplab import backend

WINDOW, WINDOWS, PROMPTS, MADE = 256, 24, 12, 160


def perplexity(target, ids: np.ndarray) -> float:
    """Over WINDOWS evenly spaced windows; the first 32 tokens of each are context only."""
    import mlx.core as mx

    losses = []
    for at in np.linspace(0, len(ids) - WINDOW - 1, WINDOWS).astype(int):
        row = mx.array(ids[at : at + WINDOW + 1].astype(np.int32))
        logits = target.forward(row[:-1], target.new_cache()).logits[32:]
        picked = mx.take_along_axis(logits, row[33:, None], axis=-1)[:, 0]
        losses.append((mx.logsumexp(logits, axis=-1) - picked).mean().item())
    return math.exp(float(np.mean(losses)))


def on_held_out(loaded, ids: np.ndarray):
    from mtplab.decode.quality import Agreement, agreement

    total = Agreement()
    for at in np.linspace(0, len(ids) - 200, 8).astype(int):
        total += agreement(loaded.target, loaded.head, ids[at : at + 200].tolist(), start=32)
    return total


def on_own_text(loaded, texts: list[str], temp: float):
    from mtplab.decode.quality import Agreement, agreement
    from mtplab.decode.settings import Settings
    from mtplab.trials.arms import Session, parse_arm

    session, total, samples = Session(loaded, parse_arm("baseline")), Agreement(), []
    settings = Settings(max_tokens=MADE, temp=temp, ignore_eos=True)
    for i, text in enumerate(texts):
        prompt = loaded.tokenizer.encode(text)
        made = list(session.request(prompt, request=i, settings=settings).tokens)
        total += agreement(loaded.target, loaded.head, prompt + made, start=len(prompt), temp=temp or 1.0)
        samples.append(loaded.tokenizer.decode(made))
    return total, samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    args = parser.parse_args()
    backend.setup()
    from mtplab.models import DATA, load_target

    loaded, out = load_target(args.model, head="require"), {}
    for kind in ("novel", "c"):
        ids = np.load(args.work / f"{kind}.held_out.npy")
        lines = (DATA / "corpora" / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["text"] for line in lines][:PROMPTS]
        row = {"perplexity": round(perplexity(loaded.target, ids), 2)}
        held = on_held_out(loaded, ids)
        greedy, _ = on_own_text(loaded, texts, 0.0)
        sampled, samples = on_own_text(loaded, texts, 0.8)
        for name, a in (("held_out", held), ("greedy", greedy), ("sampled_0.8", sampled)):
            row[name] = {"match": [round(x, 3) for x in a.match], "overlap": [round(x, 3) for x in a.overlap]}
        out[kind] = row
        print(
            f"--- {kind}: the prompt's end, then a sample at temperature 0.8\n...{texts[0][-200:]}\n>>> {samples[0]}\n"
        )
    print(json.dumps(out))


if __name__ == "__main__":
    main()
