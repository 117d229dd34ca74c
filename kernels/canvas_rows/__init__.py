"""The full-vocabulary work of a denoising step, in one function and without a second array of size [C, V].

    rows = canvas_rows(logits, temperature, uniform)      # or noise=..., or neither
    rows.entropy, rows.proposal, rows.choice            # [C] each

Importing this module imports no mlx; the first call does, so call `mtplab.backend.setup()` before it.
`reference` defines the results, `plain` computes them with `mx`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import mlx.core as mx

    Expect = Callable[[mx.array, int], mx.array]

__all__ = ["Rows", "canvas_rows"]


class Rows(NamedTuple):
    """One value a position of the canvas, [C]. Ids are int32, the rest float32."""

    choice: mx.array  # argmax of the raw logits, lowest id on ties; -1: the row holds a NaN
    top: mx.array  # maximum of the raw logits
    lse: mx.array  # log-sum-exp of the logits over the temperature
    entropy: mx.array  # nats, of the distribution at that temperature
    proposal: mx.array  # sampled from that distribution, or `choice`; -1: no distribution
    expected: mx.array | None = None  # the mean of what `expect` stands for under that distribution, [C, D]

    def log_prob(self, logits: mx.array, temperature: mx.array | float, ids: mx.array) -> mx.array:
        """Log-probability of one id a row under the same distribution, [C] float32."""
        import mlx.core as mx

        picked = mx.take_along_axis(logits, ids[:, None], axis=-1)[:, 0].astype(mx.float32)
        return picked / temperature - self.lse


def canvas_rows(
    logits: mx.array,
    temperature: mx.array | float,
    uniform: mx.array | None = None,
    *,
    noise: mx.array | None = None,
    expect: Expect | None = None,
) -> Rows:
    """Maximum, log-sum-exp, entropy, argmax and proposal of every row. `logits` [C, V], any float type.

    The proposal is sampled with one number a row, `uniform` [C] in [0, 1), by running totals in the order of ids (ids
    that share less than 2**-23 of the distribution may never be met); or with `noise` [C, V], draws from Exp(1), as
    torch does; without either it is the argmax. `expect(weights, first)` multiplies weights [C, n] of the ids from
    `first` on with their rows of a table, [C, D]: the exponentials are here already. A vocabulary of more than one
    piece is evaluated piece by piece, a smaller one not at all. Raises ValueError for shapes or a temperature that do
    not fit.
    """
    from . import plain

    if len(logits.shape) != 2 or 0 in logits.shape:
        raise ValueError(f"logits must have shape [C, V], not {logits.shape}")
    if isinstance(temperature, (int, float)) and not 0 < temperature < float("inf"):
        raise ValueError(
            f"the temperature must be above 0 and finite, not {temperature}; for argmax leave out the noise"
        )
    if uniform is not None and noise is not None:
        raise ValueError("give uniform numbers or noise, not both")
    if uniform is not None and uniform.shape != logits.shape[:1]:
        raise ValueError(f"uniform must have shape {logits.shape[:1]}, not {uniform.shape}")
    if noise is not None and noise.shape != logits.shape:
        raise ValueError(f"noise must have shape {logits.shape}, not {noise.shape}")
    return Rows(*plain.canvas_rows(logits, temperature, uniform, noise, expect))
