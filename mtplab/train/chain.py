"""A head's chained drafts over whole rows at once, exactly as its cache would see them while drafting.

In use the query of depth d at row t attends to the depth-1 rows 0..t (true hidden states of the trunk) and to its own
chain of depths 2..d-1; its position is t + d - 1. Here all rows of a depth run as one block: a cache of our own hands
every depth the keys of the earlier ones and a mask with that pattern. The head's own layer does the rest, so this
holds for every head layer that asks its cache for offset, mask and keys.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from mtplab.models.heads import HeadLayer
from mtplab.models.target import Target

WEIGHTS = (1.0, 0.7, 0.5)  # of the depths in the loss; deeper ones count as the last


class Chain:
    """The keys and values of all depths so far; to a layer it looks like a cache."""

    def __init__(self, rows: int):
        self.rows, self.offset, self.depth = rows, 0, 0  # rows of depth 1
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []

    def next_depth(self) -> None:
        """The layer's next call is of the next depth: one row less, one position further."""
        self.depth += 1
        self.offset = self.depth - 1

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """keys, values: [B, H, m, d] -> those of all depths, one after the other."""
        self.keys.append(keys)
        self.values.append(values)
        return mx.concatenate(self.keys, axis=2), mx.concatenate(self.values, axis=2)

    def make_mask(self, rows: int, **_: Any) -> mx.array:
        """bool [rows, keys of all depths]: the causal part of depth 1, then the diagonal of every later depth."""
        query = np.arange(rows)[:, None]
        parts = [np.arange(self.rows)[None] <= query]
        parts += [np.arange(self.rows - d)[None] == query for d in range(1, self.depth)]
        return mx.array(np.concatenate(parts, axis=1))


def drafts(layer: HeadLayer, hidden: mx.array, embedded: mx.array, depth: int, *, recursion: str) -> list[mx.array]:
    """Normed outputs per depth d = 1..depth. hidden, embedded: [B, L, D] -> [B, L - d, D].

    Row t of depth d predicts token t + d + 1, which the trunk predicts at position t + d.
    """
    length, out, state = hidden.shape[1], [], hidden
    chain = Chain(length - 1)
    for d in range(1, depth + 1):
        chain.next_depth()
        rows = length - d
        block, normed = layer(state[:, :rows], embedded[:, d : d + rows], chain)
        state = normed if recursion == "final" else block
        out.append(normed)
    return out


class Candidates:
    """The ids over which a batch's distributions are compared.

    Summing over a whole vocabulary costs more than the head itself. So the ids that are likely somewhere in the batch
    are taken exactly, and `others` random ones stand for the rest, each for its share of it: the estimated normalizer
    and the estimated loss are right on average. `others` = 0 takes every id.
    """

    def __init__(self, top: np.ndarray, tokens: np.ndarray, vocab: int, others: int, rng: np.random.Generator):
        likely = np.union1d(top, tokens)
        if others == 0 or len(likely) + others >= vocab:
            self.ids, weight = np.arange(vocab), np.zeros(vocab, np.float32)
        else:
            drawn = np.setdiff1d(rng.choice(vocab, others, replace=False), likely)
            share = np.log((vocab - len(likely)) / max(1, len(drawn)))
            self.ids = np.concatenate([likely, drawn])
            weight = np.concatenate([np.zeros(len(likely)), np.full(len(drawn), share)])
        self.log_weight = mx.array(weight.astype(np.float32))
        self.rows: mx.array | None = None

    def logits(self, target: Target, normed: mx.array) -> mx.array:
        """normed: [..., D] -> float32 [..., number of ids]."""
        if self.rows is None:
            self.rows = target.unembedding_rows(mx.array(self.ids)).astype(mx.float32)
        return normed @ self.rows.T


def loss(
    layer: HeadLayer,
    target: Target,
    batch: np.ndarray,
    candidates: Candidates,
    *,
    depth: int,
    recursion: str = "final",
) -> mx.array:
    """KL(trunk || head) per position, averaged over the depths with WEIGHTS. batch: rows of `collect.record`."""
    hidden = mx.array(batch["hidden"]).astype(mx.float32)
    embedded = target.embed(mx.array(batch["tokens"])).astype(mx.float32)
    goal = candidates.logits(target, hidden) - mx.array(batch["norm"])[..., None]
    p = mx.stop_gradient(mx.exp(goal + candidates.log_weight))
    weights = [WEIGHTS[min(d, len(WEIGHTS)) - 1] for d in range(1, depth + 1)]
    total = mx.array(0.0)
    for d, normed in enumerate(drafts(layer, hidden, embedded, depth, recursion=recursion), 1):
        logits = candidates.logits(target, normed)
        norm = mx.logsumexp(logits + candidates.log_weight, axis=-1, keepdims=True)
        gap = goal[:, d:] - (logits - norm)
        total = total + weights[d - 1] * (p[:, d:] * gap).sum(axis=-1).mean()
    return total / sum(weights)
