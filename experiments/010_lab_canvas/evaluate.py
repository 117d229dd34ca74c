"""The figures of lab-canvas's model card: `python evaluate.py --work DIR --model DIR`.

Held-out perplexity of the encoder pass, loss of the decoder pass by share of noise, with and without
self-conditioning, and sample text after a few numbers of steps. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np

from mtplab import backend

WINDOW, WINDOWS, PROMPT = 256, 24, 96
SHARES, STEPS = (0.25, 0.5, 0.75, 1.0), (1, 4, 8, 16, 48)


def windows(ids: np.ndarray) -> list[list[int]]:
    """Evenly spaced windows of held-out text."""
    return [
        ids[at : at + WINDOW + 1].astype(int).tolist()
        for at in np.linspace(0, len(ids) - WINDOW - 1, WINDOWS).astype(int)
    ]


def perplexity(model, ids: np.ndarray) -> float:
    """Of the encoder pass; the first 32 tokens of each window are context only."""
    import mlx.core as mx

    losses = []
    for row in windows(ids):
        logits = model.encoder_logits(row[:-1])[32:]
        picked = mx.take_along_axis(logits, mx.array(row[33:])[:, None], axis=-1)[:, 0]
        losses.append((mx.logsumexp(logits, axis=-1) - picked).mean().item())
    return math.exp(float(np.mean(losses)))


def denoising(model, ids: np.ndarray, share: float) -> tuple[float, float]:
    """Loss in nats a token of one canvas after PROMPT tokens, at the first step and with that step fed back."""
    import mlx.core as mx

    out = []
    for i, row in enumerate(windows(ids)):
        rng, cache = np.random.default_rng(i), model.new_cache()
        model.prefill(row[:PROMPT], cache)
        wanted = np.array(row[PROMPT : PROMPT + model.canvas])
        noise = rng.integers(0, model.vocab, len(wanted))
        canvas = mx.array(np.where(rng.random(len(wanted)) < share, noise, wanted))
        first = model.denoise(canvas, None, cache)
        second = model.denoise(canvas, model.soft(first / 0.6), cache)
        for logits in (first, second):
            picked = mx.take_along_axis(logits, mx.array(wanted)[:, None], axis=-1)[:, 0]
            out.append((mx.logsumexp(logits, axis=-1) - picked).mean().item())
    return float(np.mean(out[0::2])), float(np.mean(out[1::2]))


def write(model, prompt: list[int], steps: int, canvases: int = 2, seed: int = 0) -> list[int]:
    """Plain entropy-bound denoising as in the reference, for sample text only; `mtplab denoise` is the real loop."""
    import mlx.core as mx
    from mtplab.kernels.canvas_rows import canvas_rows

    from mtplab.backend.keys import uniforms

    d, cache, made = model.defaults, model.new_cache(), []
    model.prefill(prompt, cache)
    for c in range(canvases):
        key = backend.key(seed, c, "start")
        canvas, soft, before = mx.random.randint(0, model.vocab, (model.canvas,), key=key), None, None
        for step in range(steps):
            t = d["t_min"] + (d["t_max"] - d["t_min"]) * (steps - step) / steps
            logits = model.denoise(canvas, soft, cache)
            drawn = mx.array(uniforms(model.canvas, seed, c, step, "propose"))
            rows = canvas_rows(logits, t, drawn, expect=model.expect)
            soft = rows.expected
            order = mx.argsort(rows.entropy)
            entropy = rows.entropy[order]
            kept = mx.put_along_axis(
                mx.zeros_like(entropy), order, (mx.cumsum(entropy) - entropy <= d["entropy_bound"]), 0
            )
            noise = mx.random.randint(0, model.vocab, (model.canvas,), key=backend.key(seed, c, step, "renoise"))
            canvas, choice = mx.where(kept > 0, rows.proposal, noise), rows.choice.tolist()
            if choice == before and rows.entropy.mean().item() < d["confidence_threshold"]:
                break
            before = choice
        made += choice
        model.commit(choice, cache)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    args = parser.parse_args()
    backend.setup()
    from mtplab.models import DATA
    from mtplab.models.canvas import load_denoiser

    model, out = load_denoiser(args.model), {}
    for kind in ("novel", "c"):
        ids = np.load(args.work / f"{kind}.held_out.npy")
        row: dict = {"perplexity": round(perplexity(model, ids), 2)}
        for share in SHARES:
            row[f"noise {share:.0%}"] = [round(x, 3) for x in denoising(model, ids, share)]
        out[kind] = row
        text = json.loads((DATA / "corpora" / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()[0])["text"]
        print(f"--- {kind}: ...{text[-160:]}")
        for steps in STEPS:
            made = write(model, model.tokenizer.encode(text), steps)
            print(f">>> {steps} steps, NLL {score(model, text, made):.2f}: {model.tokenizer.decode(made)!r}\n")
    print(json.dumps(out))


def score(model, text: str, made: list[int]) -> float:
    """Nats a token of the made text after the prompt, under the encoder pass."""
    import mlx.core as mx

    prompt = model.tokenizer.encode(text)
    logits = model.encoder_logits([*prompt, *made])[len(prompt) - 1 : -1]
    picked = mx.take_along_axis(logits, mx.array(made)[:, None], axis=-1)[:, 0]
    return (mx.logsumexp(logits, axis=-1) - picked).mean().item()


if __name__ == "__main__":
    main()
