"""The target's own continuations with its hidden states, on disk: what the head is trained on.

A file holds `gather` rows of `length` tokens. Per position it keeps the token, the hidden state (float16), the
normalizer of the target's distribution and its likeliest ids, so that training never runs the trunk again. A file
is a plain array that is read row by row without loading it; it is a pure function of the plan and its number, and
it appears by one rename.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mtplab.backend.keys import uniform
from mtplab.errors import ModelError, RequestError
from mtplab.models.target import Target
from mtplab.train.plan import HeadPlan
from mtplab.train.texts import Start, Texts
from mtplab.trials.files import whole

TOP = 8  # likeliest ids kept per position
BLOCK = 384  # positions fed at once while all rows are given: their logits are the largest array here
AGREE = 1e-3  # logits and unembedded hidden states may differ by this share of the logits' spread

HELD_OUT = "held-out.npy"


def record(length: int, hidden: int) -> np.dtype:
    """One row on disk."""
    return np.dtype(
        [
            ("tokens", "<i4", (length,)),
            ("top", "<i4", (length, TOP)),
            ("norm", "<f4", (length,)),  # logsumexp of the logits
            ("hidden", "<f2", (length, hidden)),
            ("given", "<i4"),  # tokens that came from the text
            ("corpus", "<i4"),
        ]
    )


def shard_name(number: int) -> str:
    return f"rows-{number:05d}.npy"


def shards(plan: HeadPlan) -> list[tuple[str, int, int]]:
    """(file, number, rows) of every training file of a plan."""
    counts = [min(plan.gather, plan.rows - at) for at in range(0, plan.rows, plan.gather)]
    return [(shard_name(i), i, n) for i, n in enumerate(counts)]


def collect(folder: Path, plan: HeadPlan, target: Target, texts: Texts, tell: Callable[..., None]) -> None:
    """Make every file that is not there yet. `tell(file, tokens)` after each step; it may raise to stop."""
    wanted = [(HELD_OUT, 0, plan.gather, True), *((f, i, n, False) for f, i, n in shards(plan))]
    for file, number, count, held_out in wanted:
        if not _whole(folder / file, count):
            starts = texts.starts(number, count, held_out=held_out)
            rows = generate(target, plan, starts, f"{held_out}/{number}", partial(tell, file))
            save(folder / file, rows)


def _whole(path: Path, count: int) -> bool:
    """Not whole: a last file that an earlier, smaller plan left half filled. A damaged one is `open_rows`'s to name."""
    try:
        return path.exists() and len(np.load(path, mmap_mode="r", allow_pickle=False)) == count
    except (OSError, ValueError, EOFError, TypeError):
        return True


def save(path: Path, rows: np.ndarray) -> None:
    """Write an array whole or not at all."""
    with whole(path) as temporary, open(temporary, "wb") as file:
        np.save(file, rows, allow_pickle=False)


def open_rows(path: Path, plan: HeadPlan, hidden: int) -> np.ndarray:
    """A file's rows, mapped, not read. Raises RequestError where the file does not hold this plan's rows."""
    try:
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise RequestError(f"{path} cannot be read ({' '.join(str(error).split())}); delete it and resume") from None
    if rows.dtype != record(plan.length, hidden) or rows.ndim != 1:
        raise RequestError(f"{path} holds other rows than this plan makes; delete it and resume")
    return rows


class Rows:
    """All training rows of a run as one sequence."""

    def __init__(self, folder: Path, plan: HeadPlan, hidden: int):
        self.parts = [open_rows(folder / file, plan, hidden) for file, _, _ in shards(plan)]
        self.ends = np.cumsum([len(p) for p in self.parts])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def take(self, numbers: Sequence[int]) -> np.ndarray:
        out = []
        for n in numbers:
            part = int(np.searchsorted(self.ends, n, side="right"))
            out.append(self.parts[part][n - (self.ends[part - 1] if part else 0)])
        return np.stack(out)


def generate(
    target: Target, plan: HeadPlan, starts: Sequence[Start], name: str, tell: Callable[[int], None]
) -> np.ndarray:
    """Continue every start to `length` tokens. A row's next token is its own text's while there is some left."""
    B, L = len(starts), plan.length
    given = np.array([len(s.tokens) for s in starts])
    tokens = np.zeros((B, L), np.int32)
    for i, s in enumerate(starts):
        tokens[i, : len(s.tokens)] = s.tokens
    greedy = np.array([s.kind == "greedy" for s in starts])
    cache, out, at = target.new_cache(), None, 0
    while at < L:
        # As long as every row has text left, several positions go in at once.
        width = max(1, min(int(given.min()) - at, BLOCK // B))
        step = _step(target, mx.array(tokens[:, at : at + width]), cache)
        if out is None:
            _check_hidden(target, step)
            out = np.zeros(B, record(L, step["hidden"].shape[-1]))
        end = at + width
        _store(out, step, at, end)
        if end < L:
            u = np.array([uniform(plan.seed, name, end, i, "own text") for i in range(B)])
            chosen = _choose(step["logits"], greedy, plan.temp, u)
            tokens[:, end] = np.where(given > end, tokens[:, end], chosen)
        at = end
        tell(at)
    names = list(dict.fromkeys(plan.corpora))
    out["tokens"], out["given"] = tokens, np.minimum(given, L)
    out["corpus"] = [_index(names, s.corpus) for s in starts]
    return out


def _index(specs: Sequence[str], name: str) -> int:
    return next(i for i, s in enumerate(specs) if s == name or Path(s).stem == name)


def _step(target: Target, tokens: mx.array, cache: Any) -> dict[str, Any]:
    """tokens: [B, m] -> what is kept of these positions, and the last one's logits.

    The vocabulary-wide part is numpy's: its exp and partition are several times faster than mlx's on a CPU.
    """
    out = target.forward_batch(tokens, cache)
    if out.hidden is None:
        raise ModelError("this model gives no hidden states, so no MTP head can be trained for it")
    logits = out.logits.astype(mx.float32)
    mx.eval(logits, out.hidden, cache.arrays())
    values = np.array(logits)
    most = values.max(axis=-1, keepdims=True)
    norm = np.log(np.exp(values - most).sum(axis=-1, dtype=np.float64)) + most[..., 0]
    top = np.argpartition(values, -TOP, axis=-1)[..., -TOP:]
    return {"logits": values[:, -1], "hidden": out.hidden, "top": top, "norm": norm}


def _store(out: np.ndarray, step: dict[str, mx.array], at: int, end: int) -> None:
    hidden = np.array(step["hidden"].astype(mx.float16))
    if not np.isfinite(hidden).all():
        raise ModelError("the target's hidden states are not finite in float16 (largest value 65504)")
    out["hidden"][:, at:end] = hidden
    out["top"][:, at:end], out["norm"][:, at:end] = step["top"], step["norm"]


def _check_hidden(target: Target, step: dict[str, Any]) -> None:
    """The loss takes logits from stored hidden states: they must be the model's own."""
    logits = step["logits"][0]
    again = np.array(target.unembed(step["hidden"][0, -1:])[0].astype(mx.float32))
    if np.abs(again - logits).max() > AGREE * max(1.0, logits.std()):
        raise ModelError(
            "this model's logits are not its unembedding of its hidden states (it scales or caps them), "
            "so a head cannot be trained on stored states"
        )


def _choose(logits: np.ndarray, greedy: np.ndarray, temp: float, u: np.ndarray) -> np.ndarray:
    """logits: [B, V] -> ids [B], the likeliest where `greedy`, else drawn at `temp` by one number of [0, 1) a row."""
    mass = np.cumsum(np.exp((logits - logits.max(axis=-1, keepdims=True)) / temp), axis=-1, dtype=np.float64)
    drawn = (mass <= u[:, None] * mass[:, -1:]).sum(axis=-1)
    return np.where(greedy, logits.argmax(axis=-1), np.minimum(drawn, logits.shape[-1] - 1))
