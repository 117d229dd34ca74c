"""Train `lab-canvas`: block diffusion with uniform corruption and self-conditioning, and a causal loss beside it.

    python train.py train  --work DIR --minutes 70 [--start FILE]
    python train.py export --work DIR --out DIR

One step: the encoder pass over windows of clean text (its causal loss makes the scoring model), then the decoder pass
over every canvas of the same windows at once. Each canvas has its own share of tokens replaced by uniform random ids
and the loss is over all of its positions: the model has to find out which of them are noise. In half of the steps it
is first run without a gradient on a noisier copy of the canvases, and is given that run's distribution at a
temperature of the schedule: what it will see while denoising.

Muon for the matrices, AdamW for the rest (experiment 000). The learning rate follows the share of the time used. The
state is saved every five minutes; the same command continues it. While the file of --pause exists, training waits;
waiting does not count as time. --start takes what graft.py wrote, or the model.safetensors of an earlier export, whose
training goes on with a schedule of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from twin import Config, LabCanvas

OTHER = Path(__file__).resolve().parent.parent / "000_lab_mtp"
sys.path.append(str(OTHER))

from muon import Muon  # noqa: E402  (of experiment 000)


def _module(name: str, path: Path):
    """A module of experiment 000 whose file is called like one of ours."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


first = _module("train_lab_mtp", OTHER / "train.py")
KINDS, note, schedule = first.KINDS, first.note, first.schedule
ROWS, LENGTH = 4, 256
T_MIN, T_MAX = 0.4, 0.8  # the schedule's temperatures
CAUSAL = 0.5  # weight of the causal loss
PURE = 0.15  # share of the canvases that are all noise, as every canvas is at its first step


def corrupt(ids: torch.Tensor, share: torch.Tensor, vocab: int, g: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Two copies of ids [B, L] with `share` [B, L] of the tokens replaced; the second one has more of them replaced."""
    u = torch.rand(ids.shape, generator=g)
    worse = share + (1 - share) * torch.rand(share.shape[0], 1, generator=g)
    noise = [torch.randint(0, vocab, ids.shape, generator=g) for _ in range(2)]
    return torch.where(u < share, noise[0], ids), torch.where(u < worse, noise[1], ids)


def shares(rows: int, length: int, canvas: int, g: torch.Generator) -> torch.Tensor:
    """The share of noise of every canvas, uniform but for PURE at 1: [rows, length]."""
    each = torch.rand(rows, length // canvas, generator=g) / (1 - PURE)
    return each.clamp(max=1.0).repeat_interleave(canvas, 1)


def losses(
    model: LabCanvas, ids: torch.Tensor, g: torch.Generator, share: torch.Tensor | None = None, condition=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal loss and denoising loss of every token, [B, L - 1] and [B, L]."""
    c = model.c
    x, past = model.encode(ids)
    causal = F.cross_entropy(model.logits(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    share = shares(*ids.shape, c.canvas, g) if share is None else share
    noisy, worse = corrupt(ids, share, c.vocab, g)
    probs = None
    if torch.rand((), generator=g) < 0.5 if condition is None else condition:
        with torch.no_grad():
            before = model.denoise(worse, None, [(k.detach(), v.detach()) for k, v in past])
            t = T_MIN + (T_MAX - T_MIN) * torch.rand(len(ids), 1, 1, generator=g)
            probs = (before / t).softmax(-1)
    denoised = F.cross_entropy(model.denoise(noisy, probs, past).flatten(0, 1), ids.flatten(), reduction="none")
    return causal.view(len(ids), -1), denoised.view(ids.shape)


def optimizers(model: LabCanvas, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices (those of the experts one by one), AdamW for embedding, router and vectors."""
    named = list(model.named_parameters())
    matrix = {n for n, p in named if p.ndim >= 2 and "embed" not in n and "router" not in n}
    muon = Muon([p for n, p in named if n in matrix], lr=lr, momentum=0.95, weight_decay=0.02)
    adam = torch.optim.AdamW([p for n, p in named if n not in matrix], lr=lr / 8, betas=(0.9, 0.97), weight_decay=0.0)
    for opt in (muon, adam):
        for group in opt.param_groups:
            group["base"] = group["lr"]
    return [muon, adam]


@torch.no_grad()
def evaluate(model: LabCanvas, work: Path, batches: int = 2) -> dict:
    """Held-out losses in nats a token by kind: causal, and denoising at a few shares of noise."""
    g, data, out = torch.Generator().manual_seed(3), first.Batches(work, "held_out", 7), {}
    windows = [data.draw(8, LENGTH) for _ in range(batches)]
    for share in (0.5, 1.0):
        for condition in (False, True):
            rows = [losses(model, ids, g, torch.full(ids.shape, share), condition) for ids in windows]
            for i, kind in enumerate(KINDS):
                value = sum(d[i :: len(KINDS), model.c.canvas :].mean().item() for _, d in rows) / batches
                out[f"noise{share}{'+' if condition else ''}.{kind}"] = round(value, 3)
    for i, kind in enumerate(KINDS):
        out[f"causal.{kind}"] = round(sum(a[i :: len(KINDS), 32:].mean().item() for a, _ in rows) / batches, 3)
    return out


def start(path: Path) -> dict[str, torch.Tensor]:
    """The weights to begin with: graft.py's, or an exported model's (float16 on disk)."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return {k: v.float() for k, v in load_file(str(path)).items()}
    return torch.load(path, weights_only=True)


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    work, path, log = args.work, args.work / "canvas.pt", args.work / "canvas.log"
    model = LabCanvas(Config())
    if args.start:
        model.load_state_dict(start(args.start))
    opts, step, used, tokens = optimizers(model, args.lr), 0, 0.0, 0
    data = first.Batches(work, "train", args.seed)
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        for opt, s in zip(opts, state["opts"], strict=True):
            opt.load_state_dict(s)
        step, used, tokens = state["step"], state["used"], state["tokens"]
        data.rng = np.random.default_rng([args.seed, step])
    g = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    began, saved, budget = time.time() - used, time.time(), args.minutes * 60
    while used < budget:
        while args.pause and args.pause.exists():
            time.sleep(1)
            began += 1
        ids = data.draw(args.rows, LENGTH)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bfloat16):
            causal, denoised = losses(model, ids, g)
        (CAUSAL * causal.mean() + denoised.mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = group["base"] * schedule(step, used / budget)
            opt.step()
            opt.zero_grad(set_to_none=True)
        step, tokens, used = step + 1, tokens + ids.numel(), time.time() - began
        if step % 10 == 0:
            now = {"causal": round(causal.mean().item(), 3), "denoised": round(denoised.mean().item(), 3)}
            note(log, {"step": step, "tokens": tokens, "s": round(used), **now})
        if time.time() - saved > args.save or used >= budget:
            note(log, {"step": step, "tokens": tokens, "s": round(used), "held_out": evaluate(model, work)})
            state = {"model": model.state_dict(), "opts": [o.state_dict() for o in opts]}
            torch.save(state | {"step": step, "used": used, "tokens": tokens}, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)
            saved = time.time()


def export(work: Path, out: Path) -> None:
    """Write the DiffusionGemma folder: config, generation config, float16 weights, the tokenizer of lab-mtp."""
    from safetensors.torch import save_file

    weights = torch.load(work / "canvas.pt", weights_only=True)["model"]
    assert all(torch.isfinite(w).all() for w in weights.values())
    out.mkdir(parents=True, exist_ok=True)
    half = {k: v.to(torch.float16).contiguous() for k, v in weights.items()}
    save_file(half, str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(Config().published(), indent=1) + "\n")
    generation = {
        "max_denoising_steps": 48,
        "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1},
        "t_min": T_MIN,
        "t_max": T_MAX,
        "stability_threshold": 1,
        "confidence_threshold": 0.005,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "bos_token_id": 0,
    }
    (out / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((OTHER.parents[1] / "mtplab" / "data" / "lab-mtp" / name).read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=("train", "export"))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--start", type=Path, help="first weights: graft.pt or model.safetensors; random without")
    parser.add_argument("--minutes", type=float, default=70)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--bfloat16", action="store_true", help="matrix products in it: for a CPU that has units for it"
    )
    parser.add_argument("--save", type=float, default=300, help="seconds between two saved states")
    parser.add_argument("--pause", type=Path, help="wait while this file exists")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.phase == "export":
        export(args.work, args.out)
    else:
        train(args)


if __name__ == "__main__":
    main()
