"""The same blocks in a row without the loop and without its transaction: what rounding alone does along a chain.

A shadow is fed what an arm's verifies should have fed, block by block, and forgets the rejected rows in ways of its
own: plain KV by its length, a ring by cutting the block's tail, recurrent state by running the recurrent layers again
from the state before the block on the rows kept. A sound arm is then equal to its shadow in every bit, whatever the
widths do to the rounding; an arm that is not has a fault in its loop or its state. Where the shadow leaves the
one-token baseline, the widths are the reason: that distance is the measured noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mtplab.decode.settings import Settings
from mtplab.diagnose import state
from mtplab.diagnose.reference import aside
from mtplab.models.cache import Cache, flatten, kind
from mtplab.models.tap import tap, untap
from mtplab.models.target import Target, first_rows


class Shadow:
    """A chain of blocks over the text of one prompt."""

    def __init__(self, target: Target, prompt: Sequence[int], settings: Settings):
        self.target, self.cache = target, target.new_cache()
        self._before: tuple[list[tuple[int, Any]], int] | None = None
        tokens, step = mx.array(list(prompt)), settings.prefill_step
        for begin in range(0, len(prompt) - 1, step):
            target.forward(tokens[begin : min(begin + step, len(prompt) - 1)], self.cache)
            mx.eval(self.cache.arrays())
        target.forward(tokens[-1:], self.cache)
        mx.eval(self.cache.arrays())

    def feed(self, tokens: Sequence[int], keep: int) -> mx.array:
        """One block, of which the first `keep` rows stay. Returns the block's logits [M, V]."""
        length, rows = self.cache.length, len(tokens)
        before = [(i, state.clone(leaf)) for i, leaf in state.leaves(self.cache)]
        self._before, saved = (before, length), [leaf for _, leaf in before]
        with aside(self.target):
            with _Inputs(self.target) as inputs:
                out = self.target.forward(mx.array(list(tokens)), self.cache)
                mx.eval(out.logits, self.cache.arrays())
            if rows > 1:
                self._forget(saved, rows, keep, inputs)
        self.cache.length = length + keep
        mx.eval(self.cache.arrays())
        return out.logits

    def before(self) -> Cache | None:
        """A cache of one's own in the state before the last block."""
        return None if self._before is None else state.copied(self.target, *self._before)

    def _forget(self, saved: list[Any], rows: int, keep: int, inputs: _Inputs) -> None:
        at = 0
        for i, layer in enumerate(self.cache.layers):
            leaves = flatten(layer)
            kinds = {kind(leaf) for leaf in leaves}
            for leaf, old in zip(leaves, saved[at : at + len(leaves)], strict=True):
                if kind(leaf) == "plain":
                    leaf.offset = old.offset + keep
                    _cut_index(leaf)
                elif kind(leaf) == "window":
                    _cut(leaf, rows - keep)
                elif keep < rows:
                    leaf.cache = list(old.cache)
            at += len(leaves)
            if kinds == {"state"} and keep < rows:
                inputs.again(i, keep)


def _cut(leaf: Any, rejected: int) -> None:
    """Drop the last rows of a ring that a block was just appended to, in temporal order, down to its size."""
    if leaf._idx != leaf.keys.shape[2]:
        raise RuntimeError("a block of several rows was not appended in temporal order")
    end = leaf.keys.shape[2] - rejected
    first = max(0, end - leaf.max_size)
    sinks = leaf.keep if first else 0
    for name in ("keys", "values"):
        a = getattr(leaf, name)
        setattr(leaf, name, mx.concatenate([a[..., :sinks, :], a[..., first + sinks : end, :]], axis=2))
    leaf.offset -= rejected
    leaf._idx = end - first


def _cut_index(leaf: Any) -> None:
    """An indexer's keys and positions down to the leaf's length; what it had pooled of them is made again."""
    if getattr(leaf, "index_keys", None) is not None:
        leaf.index_keys = leaf.index_keys[:, : leaf.offset]
        leaf.index_position_ids = leaf.index_position_ids[..., : leaf.offset]
        leaf.index_block_keys = None


class _Inputs:
    """What every layer was called with during one block, so that a recurrent one can be called again on fewer rows."""

    def __init__(self, target: Target):
        self.layers, self.calls = list(target.model.layers), {}
        kinds = target.cache_kinds
        self.recurrent = [i for i, ks in enumerate(kinds) if "state" in ks and i < len(self.layers)]

    def __enter__(self) -> _Inputs:
        for i in self.recurrent:
            tap(self.layers[i], lambda args, kwargs, _out, i=i: self.calls.setdefault(i, (args, kwargs)))
        return self

    def __exit__(self, *error: object) -> None:
        for i in self.recurrent:
            untap(self.layers[i])

    def again(self, i: int, rows: int) -> None:
        args, kwargs = self.calls[i]
        self.layers[i](*(first_rows(a, rows) for a in args), **{k: first_rows(v, rows) for k, v in kwargs.items()})
