"""The verdict on a block of drafts: computed on the device, read by the host once.

    verdict = read(accept(logits, drafts))          # greedy
    verdict = read(accept_sampled(p, q, drafts, u, v))   # temperature > 0

Importing this module imports no mlx; the first call does, so call `mtplab.backend.setup()` before it.
`reference` defines the results, `plain` computes them with `mx`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtplab.errors import ModelError

if TYPE_CHECKING:
    import mlx.core as mx

__all__ = ["Verdict", "accept", "accept_sampled", "draw", "read"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`accepted` drafts are kept, `token` follows them; `choices`: the target's argmax of every row (greedy only)."""

    accepted: int
    token: int
    choices: tuple[int, ...] = ()


def _check(rows: tuple[int, ...], drafts: tuple[int, ...], **others: tuple[int, ...] | None) -> None:
    if len(rows) != 2 or len(drafts) != 1 or rows[0] != drafts[0] + 1:
        raise ValueError(f"K drafts need K+1 rows [K+1, V]: got drafts {drafts} and rows {rows}")
    wanted = {"q": (drafts[0], rows[1]), "u": drafts}
    for name, shape in others.items():
        if shape is not None and shape != wanted[name]:
            raise ValueError(f"{name} must have shape {wanted[name]}, not {shape}")


def accept(logits: mx.array, drafts: mx.array) -> mx.array:
    """Greedy acceptance on the device. Nothing is evaluated; hand the result to `read`.

    `logits` [K+1, V], any float type, raw (compared in float32); `drafts` [K], int32, K >= 0.
    Returns int32 [K+3]: drafts kept, next token, the argmax of each row (lowest id on ties; -1 for a row with a
    NaN). Raises ValueError for shapes that do not fit.
    """
    from . import plain

    _check(logits.shape, drafts.shape)
    return plain.accept(logits, drafts)


def accept_sampled(p: mx.array, q: mx.array | None, drafts: mx.array, u: mx.array, v: mx.array | float) -> mx.array:
    """Exact acceptance at temperature > 0 on the device, in float32. Nothing is evaluated.

    `p` [K+1, V]: the target's probabilities. `q` [K, V]: the distributions that the drafts were DRAWN from (with
    `draw`, say), after the same temperature/top-p/top-k chain as `p`; None if every draft is a point mass (an
    argmax, an n-gram, an oracle). There is no way to score a point mass by min(1, p/q), which is not exact.
    `u` [K], `v`: uniform in [0, 1), float32, independent of the drafts.
    Returns int32 [2]: drafts kept and next token (-1 for a NaN or a row without mass).
    """
    from . import plain

    _check(p.shape, drafts.shape, q=None if q is None else q.shape, u=u.shape)
    return plain.accept_sampled(p, q, drafts, u, v)


def draw(weights: mx.array, v: mx.array | float) -> mx.array:
    """Draw one id from `weights` [V] (need not be normalized) by inverse CDF of `v` in [0, 1): int32 [1]."""
    from . import plain

    return plain.draw(weights, v)


def read(packed: mx.array) -> Verdict:
    """The one host read. Raises ModelError if the target's row for the next token held a NaN or no mass at all."""
    accepted, token, *choices = packed.tolist()
    if token < 0:
        raise ModelError(
            f"the target's row {accepted} of this block holds NaN or no probability; "
            "check the weights, or load the model in float32"
        )
    return Verdict(accepted, token, tuple(choices))
