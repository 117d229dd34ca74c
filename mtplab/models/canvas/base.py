"""What a canvas decoder needs of a model: the `Denoiser`, and the cache that its encoder passes leave.

    cache = model.new_cache()
    model.prefill(prompt, cache)                          # writes the cache
    logits = model.denoise(canvas, None, cache)           # any number of times; reads, never writes
    model.commit(tokens, cache)                           # the one writing pass of a finished canvas

Models differ in three declared facts: what a canvas begins with (`start`: uniform random ids, or `mask_id`), whether
the distribution of the step before is fed back (`self_conditioning`), and whether committed rows saw what came after
them (`commit_order`: "causal", or "block", both ways inside a block).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mtplab.errors import ModelError, RequestError
from mtplab.models.tokenizer import Tokenizer


class CanvasCache:
    """Keys and values of every layer, [1, kv heads, rows, head size]; sliding layers hold the rows still in sight.

    A write replaces the arrays and never changes them, so that an interrupted pass leaves the cache as it was.
    """

    def __init__(self, layers: int):
        self.length = 0  # rows written
        self.tail: tuple[int, ...] = ()  # committed tokens whose block is not whole yet ("block" order only)
        self.layers: list[tuple[mx.array, mx.array] | None] = [None] * layers

    def arrays(self) -> list[mx.array]:
        """Everything to evaluate when the cache has to be finished (timing, memory)."""
        return [a for layer in self.layers if layer is not None for a in layer]

    def write(self, layers: list[tuple[mx.array, mx.array]], rows: int) -> None:
        """Take the whole new state at once."""
        self.layers, self.length = list(layers), self.length + rows


class Denoiser(ABC):
    """See the module. Loaded by `load_denoiser`; one sequence at a time."""

    start: str  # "uniform" or "mask"
    self_conditioning: bool
    commit_order: str  # "causal" or "block"
    scores: bool  # whether `encoder_logits` gives a causal model's likelihood

    vocab: int
    width: int  # of an embedding, D
    canvas: int  # positions of the longest canvas
    mask_id: int | None = None
    context: int  # positions the model was declared for
    model: nn.Module
    tokenizer: Tokenizer
    folder: Path
    facts: dict[str, Any]
    defaults: dict[str, Any]  # what the checkpoint says about decoding, by our names (see `settings.defaults`)
    default_sources: dict[str, str]  # file and key of each of them

    @property
    def eos_ids(self) -> frozenset[int]:
        return self.tokenizer.eos_ids

    def new_cache(self) -> CanvasCache:
        return CanvasCache(len(self.facts["layers"]))

    def room(self, cache: CanvasCache) -> int:
        """Positions that the next canvas may have; fewer than `canvas` where it has to end with a block."""
        return self.canvas

    @abstractmethod
    def prefill(self, tokens: Sequence[int], cache: CanvasCache, step: int = 512) -> int:
        """Write the prompt in chunks of `chunk(step)` tokens, each evaluated; returns the passes that took.

        Raises RequestError for unknown ids.
        """

    def chunk(self, step: int) -> int:
        """The chunk that prefill really uses where `step` is asked for."""
        return step

    @abstractmethod
    def denoise(self, canvas: mx.array, soft: mx.array | None, cache: CanvasCache) -> mx.array:
        """canvas: [C] ids; soft: [C, D], what `expect` makes of the last step's distribution, None at the first step.

        Returns float32 logits [C, V], not evaluated; the cache is only read.
        """

    def expect(self, weights: mx.array, first: int) -> mx.array:
        """weights [C, n] of the ids from `first` on, times their rows of the embedding: [C, D].

        Summed over the vocabulary and divided by the sum of the weights it is the expected embedding: `soft`.
        """
        raise NotImplementedError("this model takes no self-conditioning")

    def soft(self, logits: mx.array) -> mx.array:
        """The expected embedding under softmax(logits). [C, V] -> [C, D]; the loop has it from `canvas_rows`."""
        return self.expect(mx.softmax(logits.astype(mx.float32), axis=-1), 0)

    @abstractmethod
    def commit(self, tokens: Sequence[int], cache: CanvasCache) -> bool:
        """Write a finished canvas, all of it or its valid tokens. Not evaluated: see `CanvasCache.arrays`.

        Returns whether a pass of the model was needed.
        """

    @abstractmethod
    def encoder_logits(self, tokens: Sequence[int]) -> mx.array:
        """Causal logits of a text, float32 [L, V]: row t is about token t + 1. Raises RequestError without `scores`."""

    def check_ids(self, tokens: Sequence[int]) -> None:
        """MLX reads past the end of an embedding without a word, so ids are checked before they are fed."""
        bad = next((t for t in tokens if not 0 <= t < self.vocab), None)
        if bad is not None:
            raise RequestError(f"token {bad} is not an id of this model's vocabulary of {self.vocab:,}")
        if not len(tokens):
            raise RequestError("a canvas model needs at least one token to encode; give a prompt")

    def check_canvas(self, canvas: mx.array, soft: mx.array | None) -> None:
        """Shapes that a step cannot honour, as a ModelError or RequestError."""
        if canvas.ndim != 1 or not 0 < canvas.shape[0] <= self.canvas:
            raise RequestError(f"a canvas has 1 to {self.canvas} positions in this model, not {list(canvas.shape)}")
        if soft is not None and not self.self_conditioning:
            raise RequestError("this model takes no self-conditioning; turn it off")
        if soft is not None and soft.shape != (canvas.shape[0], self.width):
            wanted = [canvas.shape[0], self.width]
            raise ModelError(f"the expected embedding must have shape {wanted}, not {list(soft.shape)}")
