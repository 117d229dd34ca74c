"""Parts that canvas models share: norms without a weight, rotary embedding, a window of keys, experts in one tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

FEW_EXPERTS = 8  # up to here all experts' products run on every row, instead of a gather per row and expert


GELU_1 = 2 * math.sqrt(2 / math.pi)
GELU_3 = 0.044715 * GELU_1


def gelu(x: mx.array) -> mx.array:
    """GELU in its tanh form: (1 + tanh(u)) / 2 is sigmoid(2 u). One transcendental function instead of a power and a
    tanh, which on a CPU is most of what an activation costs."""
    return x * mx.sigmoid(x * (GELU_1 + GELU_3 * (x * x)))


def rms(x: mx.array, eps: float) -> mx.array:
    """Root mean square norm without a weight, over the last axis."""
    return mx.fast.rms_norm(x, None, eps)


class Rope(nn.Module):
    """Rotary embedding, halves split, on [..., rows, head size].

    `proportional` turns only the first int(share * size // 2) angles, their frequencies as if all were turned.
    """

    def __init__(self, size: int, theta: float, *, proportional: float | None = None, factor: float = 1.0):
        super().__init__()
        self._size, self._theta, self._freqs = size, theta, None
        if proportional is not None:
            turned = int(proportional * size // 2)
            # These are wavelengths: an infinite one does not turn.
            freqs = factor * theta ** (mx.arange(turned).astype(mx.float32) * 2 / size)
            self._freqs = mx.concatenate([freqs, mx.full((size // 2 - turned,), float("inf"))])

    def __call__(self, x: mx.array, offset: int) -> mx.array:
        base = self._theta if self._freqs is None else None
        return mx.fast.rope(x, self._size, traditional=False, base=base, scale=1.0, offset=offset, freqs=self._freqs)


def join(past: tuple[mx.array, mx.array] | None, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """Keys and values after those of the cache: [1, kv heads, rows, head size] each."""
    if past is None:
        return keys, values
    return mx.concatenate([past[0], keys], axis=2), mx.concatenate([past[1], values], axis=2)


def causal_mask(rows: int, columns: int, window: int | None) -> mx.array | str | None:
    """For `rows` new rows at the end of `columns`: a mask for attention, the word "causal" where that is enough."""
    if window is None or columns <= window:
        return "causal" if rows > 1 else None
    at, seen = mx.arange(columns - rows, columns)[:, None], mx.arange(columns)[None]
    return (seen <= at) & (seen > at - window)


class Stacked(nn.Module):
    """The weights of all experts in one tensor, [experts, out, in]."""

    def __init__(self, experts: int, size_in: int, size_out: int):
        super().__init__()
        self.weight = mx.zeros((experts, size_out, size_in))

    def each(self, x: mx.array) -> mx.array:
        """x: [T, in] or [experts, T, in] -> [experts, T, out]."""
        return x @ self.weight.swapaxes(-1, -2)

    def chosen(self, x: mx.array, experts: mx.array, ordered: bool) -> mx.array:
        """x: [..., 1, in] broadcast against `experts` [...] -> [..., 1, out]."""
        return mx.gather_mm(x, self.weight.swapaxes(-1, -2), rhs_indices=experts, sorted_indices=ordered)

    def to_quantized(self, group_size: int = 64, bits: int = 4, mode: str = "affine", **_: Any) -> QuantizedStacked:
        return QuantizedStacked(self.weight, group_size, bits, mode)


class QuantizedStacked(nn.Module):
    """`Stacked`, packed. Only affine modes have biases."""

    def __init__(self, weight: mx.array, group_size: int, bits: int, mode: str):
        super().__init__()
        self._how = {"group_size": group_size, "bits": bits, "mode": mode}
        self.weight, self.scales, *rest = mx.quantize(weight, **self._how)
        if rest:
            self.biases = rest[0]
        self.freeze()

    def each(self, x: mx.array) -> mx.array:
        x = mx.broadcast_to(x, (self.weight.shape[0], *x.shape[-2:]))
        return mx.quantized_matmul(x, self.weight, self.scales, self.get("biases"), transpose=True, **self._how)

    def chosen(self, x: mx.array, experts: mx.array, ordered: bool) -> mx.array:
        packed = (self.weight, self.scales, self.get("biases"))
        return mx.gather_qmm(x, *packed, rhs_indices=experts, transpose=True, sorted_indices=ordered, **self._how)


def mix(
    x: mx.array,
    experts: mx.array,
    weights: mx.array,
    into: Sequence[Any],
    act: Callable[..., mx.array],
    out: Any,
) -> mx.array:
    """Weighted sum over the chosen experts. x: [T, D]; experts, weights: [T, k] -> [T, D].

    An expert is out(act(*into)), all `Stacked`. With few experts the products run over all of them, and what is not
    chosen counts as zero: a choice by the model alone, so that rows do not depend on their number.
    """
    total = out.weight.shape[0]
    if total <= FEW_EXPERTS:
        at = experts.T[..., None]  # the activation is computed for the chosen only: it costs more than the products
        inner = act(*(mx.take_along_axis(s.each(x), at, axis=0) for s in into)) * weights.T[..., None]
        blank = mx.zeros((total, *inner.shape[1:]), inner.dtype)
        return out.each(mx.put_along_axis(blank, at, inner, axis=0)).sum(axis=0)
    if experts.size < 64:
        rows = x[:, None, None]
        each = out.chosen(act(*(s.chosen(rows, experts, False) for s in into)), experts, False)
        return (each[..., 0, :] * weights[..., None]).sum(axis=1)
    # Sorted by expert, every expert's weights are read once.
    order = mx.argsort(experts.flatten())
    rows, chosen = x[order // experts.shape[1]][:, None], experts.flatten()[order]
    each = out.chosen(act(*(s.chosen(rows, chosen, True) for s in into)), chosen, True)[:, 0][mx.argsort(order)]
    return (each.reshape(*experts.shape, -1) * weights[..., None]).sum(axis=1)
