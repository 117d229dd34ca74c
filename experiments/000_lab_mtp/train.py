"""Train `lab-mtp`: first the trunk, then its MTP head, both resumable and scheduled by wall time.

    python train.py trunk --work DIR --minutes 75     # next-token loss on novels and C, half and half
    python train.py export --work DIR --out DIR/trunk
    python sample.py --work DIR --model DIR/trunk     # the trunk's own continuations
    python train.py head  --work DIR --minutes 35     # trunk frozen; chained three deep; KL to the trunk
    python train.py export --work DIR --out DIR       # MiMo layout, float16

Muon for the matrices, AdamW for the rest: at some million tokens it needs about half the tokens of AdamW alone.
The learning rate follows the share of the time used (warm-up, flat, linear decay over the last 30 %), so a
machine that is busy with other work still ends on a finished schedule. Every five minutes the state is saved;
the same command continues it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from model import Config, LabMTP
from muon import Muon

KINDS = ("novel", "c")
ROWS, LENGTH, LONG = 12, 256, 512


class Batches:
    """Random windows, half novel and half C; the generator's state is part of the checkpoint."""

    def __init__(self, work: Path, split: str, seed: int):
        self.data = {k: np.load(work / f"{k}.{split}.npy") for k in KINDS}
        self.rng = np.random.default_rng(seed)

    def draw(self, rows: int, length: int) -> torch.Tensor:
        out = []
        for r in range(rows):
            ids = self.data[KINDS[r % len(KINDS)]]
            at = int(self.rng.integers(0, len(ids) - length))
            out.append(ids[at : at + length].astype(np.int64))
        return torch.from_numpy(np.stack(out))


class OwnText(Batches):
    """Half the rows from the texts, half the trunk's own continuations (`sample.py`), where there are any."""

    def __init__(self, work: Path, split: str, seed: int):
        super().__init__(work, split, seed)
        path = work / "samples.npy"
        self.samples = np.load(path) if path.exists() else None

    def draw(self, rows: int, length: int) -> torch.Tensor:
        if self.samples is None or length > self.samples.shape[1]:
            return super().draw(rows, length)
        # Row parity tells the kind (novel, C) in the statistics; the samples alternate in the same way.
        pairs = self.rng.integers(0, len(self.samples) // 2, rows // 4) * 2
        chosen = np.stack([pairs, pairs + 1], 1).ravel()
        own = torch.from_numpy(self.samples[chosen].astype(np.int64))
        return torch.cat([super().draw(rows - len(own), length), own])


def optimizers(model: torch.nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.requires_grad and p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.requires_grad and (p.ndim != 2 or "embed" in n)]
    muon = Muon(matrices, lr=lr, momentum=0.95, weight_decay=0.02)
    adam = torch.optim.AdamW(rest, lr=lr / 8, betas=(0.9, 0.97), weight_decay=0.0)
    for opt in (muon, adam):
        for group in opt.param_groups:
            group["base"] = group["lr"]
    return [muon, adam]


def schedule(step: int, share: float) -> float:
    return min(1.0, (step + 1) / 40) * min(1.0, max(0.0, 1.0 - share) / 0.3)


def trunk_loss(model: LabMTP, ids: torch.Tensor) -> tuple[torch.Tensor, dict]:
    logits = model.unembed(model.hidden(ids[:, :-1]))
    each = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
    return each.mean(), {k: each[i :: len(KINDS)].mean().item() for i, k in enumerate(KINDS)}


def head_loss(model: LabMTP, ids: torch.Tensor, weights=(1.0, 0.7, 0.5)) -> tuple[torch.Tensor, dict]:
    """KL(trunk || head) at every depth, chained; also top-1 match per kind and depth."""
    with torch.no_grad():
        hidden = model.hidden(ids)
        target = model.unembed(hidden).log_softmax(-1)
    total, stats = torch.zeros(()), {}
    for d, logits in enumerate(model.drafts(ids, hidden), 1):
        # Row j of depth d predicts token j+d+1, which the trunk predicts from position j+d.
        goal = target[:, d : d + logits.shape[1]]
        log_q = logits.log_softmax(-1)
        total = total + weights[d - 1] * (goal.exp() * (goal - log_q)).sum(-1).mean()
        same = (log_q.argmax(-1) == goal.argmax(-1)).float()
        for i, k in enumerate(KINDS):
            stats[f"match{d}.{k}"] = same[i :: len(KINDS)].mean().item()
    return total, stats


@torch.no_grad()
def evaluate(model: LabMTP, loss, work: Path, batches: int = 6) -> dict:
    held = Batches(work, "held_out", 7)
    rows = [loss(model, held.draw(8, LONG))[1] for _ in range(batches)]
    return {k: sum(r[k] for r in rows) / len(rows) for k in rows[0]}


def note(log: Path, entry: dict) -> None:
    with open(log, "a", encoding="utf-8") as f:
        f.write(json.dumps(entry) + "\n")


def run(phase: str, work: Path, minutes: float, lr: float, seed: int) -> None:
    torch.manual_seed(seed)
    source = Batches if phase == "trunk" else OwnText
    model, loss = LabMTP(Config()), trunk_loss if phase == "trunk" else head_loss
    state_path = work / f"{phase}.pt"
    if phase == "head":
        model.load_state_dict(torch.load(work / "trunk.pt", weights_only=True)["model"])
        for name, p in model.named_parameters():
            p.requires_grad_("mtp_layers" in name)
    else:
        for name, p in model.named_parameters():
            p.requires_grad_("mtp_layers" not in name)
    opts, data, step, used, tokens = optimizers(model, lr), source(work, "train", seed), 0, 0.0, 0
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        model.load_state_dict(state["model"])
        for opt, s in zip(opts, state["opts"], strict=True):
            opt.load_state_dict(s)
        step, used, tokens = state["step"], state["used"], state["tokens"]
        data.rng = np.random.default_rng([seed, step])
    began, saved, budget = time.time() - used, time.time(), minutes * 60
    log = work / f"{phase}.log"
    while used < budget:
        share = used / budget
        # The trunk's last stretch sees longer windows: half the rows, the same tokens.
        longer = phase == "trunk" and share >= 0.75
        ids = data.draw(ROWS // 2, LONG) if longer else data.draw(ROWS, LENGTH)
        value, stats = loss(model, ids)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = group["base"] * schedule(step, share)
            opt.step()
            opt.zero_grad(set_to_none=True)
        step, tokens, used = step + 1, tokens + ids.numel(), time.time() - began
        if step % 20 == 0:
            note(log, {"step": step, "tokens": tokens, "s": round(used), **stats})
        if time.time() - saved > 300 or used >= budget:
            held = evaluate(model, loss, work)
            note(log, {"step": step, "tokens": tokens, "s": round(used), "held_out": held})
            state = {"model": model.state_dict(), "opts": [o.state_dict() for o in opts]}
            torch.save(state | {"step": step, "used": used, "tokens": tokens}, state_path.with_suffix(".tmp"))
            state_path.with_suffix(".tmp").replace(state_path)
            saved = time.time()


def export(work: Path, out: Path) -> None:
    """Write the MiMo folder: config.json, model.safetensors (float16), tokenizer files."""
    from safetensors.torch import save_file

    path = work / "head.pt" if (work / "head.pt").exists() else work / "trunk.pt"
    weights = torch.load(path, weights_only=True)["model"]
    assert all(torch.isfinite(w).all() for w in weights.values())
    out.mkdir(parents=True, exist_ok=True)
    half = {k: v.to(torch.float16).contiguous() for k, v in weights.items()}
    save_file(half, str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(Config().to_mimo(), indent=1) + "\n")
    (out / "tokenizer.json").write_bytes((work / "tokenizer.json").read_bytes())
    special = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings | special, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=("trunk", "head", "export"))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=75)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.phase == "export":
        export(args.work, args.out)
    else:
        run(args.phase, args.work, args.minutes, args.lr, args.seed)


if __name__ == "__main__":
    main()
