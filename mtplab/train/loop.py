"""Train a head: steps over collected rows, a learning curve, and a state that survives any end.

Muon for the matrices, AdamW for the rest (experiments/000_lab_mtp). The learning rate warms up, stays, and falls
linearly over the last 30 % of the budget. A step's batch depends on the seed and the step's number alone, so a run
that was stopped and resumed makes the same head as one that was not, if its budget is counted in steps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mtplab.backend.keys import key
from mtplab.errors import ModelError, RequestError
from mtplab.models.heads import Head
from mtplab.models.target import Target
from mtplab.train import chain
from mtplab.train.collect import HELD_OUT, Rows, open_rows
from mtplab.train.plan import HeadPlan
from mtplab.trials.files import dumps, whole, write_text

WARM_UP, COOL_DOWN, CLIP = 40, 0.3, 1.0
CURVE_POINTS = 10
FIRST_ROWS, RIDGE = 48, 0.01  # what the first head is fitted to
CURVE_ROWS, FINAL_ROWS = 12, 24  # held-out rows of a point of the curve, and of the last one
CURVE_STRIDE = 4  # one position in so many counts there; in the last point all do
SAVE_EVERY_S = 60.0
STATE, CURVE = "state.safetensors", "curve.jsonl"


@dataclass
class Progress:
    """Where the training stands; with the head's and the optimizers' arrays it is the whole state."""

    step: int = 0
    seconds: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)


class Stopped(Exception):
    """Asked to end between two steps; the state is on disk."""


class Training:
    """One head under training in a run folder."""

    def __init__(self, folder: Path, plan: HeadPlan, target: Target, head: Head):
        self.folder, self.plan, self.target, self.head, self.layer = folder, plan, target, head, head.layers[0]
        self.layer.train()
        dim = self.layer.hidden_norm.weight.shape[0]
        self.rows = Rows(folder, plan, dim)
        self.held = open_rows(folder / HELD_OUT, plan, dim)
        self.optimizer = optimizer(plan.lr)
        self.optimizer.init(self.layer.trainable_parameters())
        self.rates = [float(o.learning_rate.item()) for o in self.optimizer.optimizers]
        self.at = Progress()
        self.vocab = target.unembedding_size()
        self.value_and_grad = nn.value_and_grad(self.layer, self._loss)
        if (folder / STATE).exists():
            self._load()
        else:
            begin(self.layer, target, self.rows.take(range(min(FIRST_ROWS, len(self.rows)))), plan.seed)

    def _loss(self, batch: np.ndarray, candidates: chain.Candidates) -> mx.array:
        recursion = self.head.spec.recursion
        return chain.loss(self.layer, self.target, batch, candidates, depth=self.plan.depth, recursion=recursion)

    @property
    def share(self) -> float:
        """How much of the budget is used, 0..1."""
        plan = self.plan
        return min(1.0, self.at.step / plan.steps if plan.steps else self.at.seconds / (plan.minutes * 60))

    def run(self, tell: Callable[[Progress, float], None], stop: Callable[[], bool]) -> list[dict[str, Any]]:
        """To the end of the budget; returns the learning curve. Raises Stopped once `stop()` is true."""
        if not self.at.curve:
            self._evaluate(CURVE_ROWS, None)
        began, before, value = time.monotonic(), self.at.seconds, None
        saved = began
        while self.share < 1.0:
            points = int(self.share * CURVE_POINTS)
            value = self.step()
            self.at.seconds = before + time.monotonic() - began
            tell(self.at, value)
            if points < int(self.share * CURVE_POINTS) < CURVE_POINTS:
                self._evaluate(CURVE_ROWS, value)
                self.save()
                saved = time.monotonic()
            if stop():
                self.save()
                raise Stopped
            if time.monotonic() - saved > SAVE_EVERY_S:
                self.save()
                saved = time.monotonic()
        # The last look takes the longest: what was learned is safe before it begins.
        self.save()
        if self.at.curve[-1]["step"] != self.at.step:
            self._evaluate(FINAL_ROWS, value)
            self.save()
        return self.at.curve

    def step(self) -> float:
        """One batch. Returns its loss."""
        rng = np.random.default_rng([self.plan.seed, self.at.step])
        count = min(self.plan.batch, len(self.rows))
        batch = self.rows.take(rng.choice(len(self.rows), count, replace=False))
        candidates = chain.Candidates(batch["top"], batch["tokens"], self.vocab, self.plan.candidates, rng)
        value, grads = self.value_and_grad(batch, candidates)
        grads, norm = optim.clip_grad_norm(grads, CLIP)
        factor = schedule(self.at.step, self.share)
        for part, rate in zip(self.optimizer.optimizers, self.rates, strict=True):
            part.learning_rate = rate * factor
        self.optimizer.update(self.layer, grads)
        mx.eval(value, norm, self.layer.parameters(), self.optimizer.state)
        if not np.isfinite(value.item()) or not np.isfinite(norm.item()):
            raise ModelError(f"the loss is not finite at step {self.at.step}; lower --lr {self.plan.lr}")
        self.at.step += 1
        return value.item()

    def _evaluate(self, rows: int, value: float | None) -> None:
        stride = 1 if rows == FINAL_ROWS else CURVE_STRIDE
        held = agreement(self.head, self.target, self.held[:rows], self.plan.depth, stride=stride)
        tokens = self.at.step * min(self.plan.batch, len(self.rows)) * self.plan.length
        entry = {"step": self.at.step, "tokens": tokens, "seconds": round(self.at.seconds, 1), "loss": value}
        self.at.curve.append(entry | {"held_out_rows": min(rows, len(self.held)), **held})
        write_text(self.folder / CURVE, "".join(dumps(e) + "\n" for e in self.at.curve))

    def save(self) -> None:
        """Head, optimizers and progress in one file, by one rename."""
        arrays = {f"head.{n}": a for n, a in tree_flatten(self.layer.parameters())}
        arrays |= {f"optimizer.{n}": a for n, a in tree_flatten(self.optimizer.state)}
        about = {"step": self.at.step, "seconds": self.at.seconds, "curve": self.at.curve}
        write_arrays(self.folder / STATE, arrays, {"progress": dumps(about)})

    def _load(self) -> None:
        path = self.folder / STATE
        try:
            arrays, about = mx.load(str(path), return_metadata=True)
            told = json.loads(about["progress"])
            self.at = Progress(told["step"], told["seconds"], told["curve"])
            self.layer.load_weights([(n[5:], a) for n, a in arrays.items() if n.startswith("head.")], strict=True)
            state = [(n[10:], a) for n, a in arrays.items() if n.startswith("optimizer.")]
            self.optimizer.state = tree_unflatten(state)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise RequestError(f"{path} is damaged ({reason}); delete it to train from the beginning") from None
        mx.eval(self.layer.parameters(), self.optimizer.state)


def optimizer(lr: float) -> optim.MultiOptimizer:
    """Muon for the matrices, AdamW at an eighth of its rate for norms and biases."""
    muon = optim.Muon(learning_rate=lr, momentum=0.95, weight_decay=0.0)
    adam = optim.AdamW(learning_rate=lr / 8, betas=[0.9, 0.97], weight_decay=0.0)
    return optim.MultiOptimizer([muon, adam], [lambda _, a: a.ndim == 2])


def schedule(step: int, share: float) -> float:
    """Factor of the learning rate: warm-up over 40 steps or 5 % of the budget, fall at the end of the budget."""
    return min(1.0, max((step + 1) / WARM_UP, share / 0.05)) * min(1.0, max(0.0, 1.0 - share) / COOL_DOWN)


def begin(layer: nn.Module, target: Target, rows: np.ndarray, seed: int) -> None:
    """The best head without a block: the next state as a linear map of this one and the next token's embedding.

    The hidden norm gives every dimension of the trunk's states the size one, the final norm gives it its own size
    back, and between them the projection is the ridge regression over `rows`. The block adds nothing yet.
    """
    for name, a in tree_flatten(layer.parameters()):
        if a.ndim == 2 and not name.endswith(("o_proj.weight", "down_proj.weight")):
            value = mx.random.normal(a.shape, key=key(seed, "new head", name)) * a.shape[-1] ** -0.5
        else:
            value = mx.ones(a.shape) if name.endswith("norm.weight") else mx.zeros(a.shape)
        layer.load_weights([(name, value)], strict=False)
    hidden = rows["hidden"].astype(np.float32)
    size = np.sqrt(np.square(hidden).mean(axis=(0, 1))) + 1e-6
    norms = {"hidden_norm.weight": np.sqrt(np.square(size).mean()) / size, "final_norm.weight": size}
    layer.load_weights([(n, mx.array(a.astype(np.float32))) for n, a in norms.items()], strict=False)
    embedded = target.embed(mx.array(rows["tokens"][:, 1:])).astype(mx.float32)
    parts = [layer.hidden_norm(mx.array(hidden[:, :-1])), layer.embed_norm(embedded)]
    x = np.array(mx.concatenate(parts if layer._fuse_hidden_first else parts[::-1], axis=-1))
    layer.load_weights([("proj.weight", mx.array(_ridge(x, hidden[:, 1:] / size)))], strict=False)
    mx.eval(layer.parameters())


def _ridge(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """W [outputs, inputs] of the least squares y = W x with a hundredth of the inputs' size as ridge."""
    x, y = (a.reshape(-1, a.shape[-1]).astype(np.float64) for a in (x, y))
    gram = x.T @ x
    gram += np.eye(len(gram)) * (RIDGE * np.trace(gram) / len(gram))
    return np.linalg.solve(gram, x.T @ y).T.astype(np.float32)


def agreement(head: Head, target: Target, rows: np.ndarray, depth: int, *, stride: int = 1) -> dict[str, Any]:
    """`match` and `overlap` per depth on held-out rows, over the whole vocabulary (`decode.quality` position by
    position, here a row at once), for given text and for the target's own, at every `stride`-th position."""
    sums = {part: np.zeros((depth, 3)) for part in ("text", "own")}
    for row in rows:
        for d, (same, shared) in enumerate(_row(head, target, row, depth, stride), 1):
            # Row t of depth d is about token t + d + 1: whose is it?
            about = stride * np.arange(len(same)) + d + 1
            own = (about >= row["given"]) & (row["given"] < len(row["tokens"]))
            for part, chosen in (("text", ~own), ("own", own)):
                sums[part][d - 1] += [chosen.sum(), same[chosen].sum(), shared[chosen].sum()]
    out: dict[str, Any] = {}
    for part, s in sums.items():
        out[f"match_{part}"] = [float(m / n) if n else None for n, m, _ in s]
        out[f"overlap_{part}"] = [float(o / n) if n else None for n, _, o in s]
    return out


def _row(head: Head, target: Target, row: np.void, depth: int, stride: int) -> list[tuple[np.ndarray, np.ndarray]]:
    hidden = mx.array(row["hidden"]).astype(mx.float32)[None]
    embedded = target.embed(mx.array(row["tokens"])).astype(mx.float32)[None]
    out = []
    for d, normed in enumerate(chain.drafts(head.layers[0], hidden, embedded, depth, recursion=head.spec.recursion), 1):
        pairs = (normed[0, ::stride], hidden[0, d::stride])
        q, p = (mx.softmax(target.unembed(h).astype(mx.float32), axis=-1, precise=True) for h in pairs)
        same = mx.argmax(q, axis=-1) == mx.argmax(p, axis=-1)
        out.append((np.array(same), np.array(mx.minimum(q, p).sum(axis=-1))))
    return out


def write_arrays(path: Path, arrays: dict[str, mx.array], about: dict[str, str]) -> None:
    """A safetensors file, whole or not at all."""
    with whole(path, suffix=".safetensors") as temporary:
        mx.save_safetensors(str(temporary), arrays, about)
