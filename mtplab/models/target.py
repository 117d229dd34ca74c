"""An autoregressive model behind one small surface: forward, embed, unembed, new_cache.

mlx-lm's inner model returns the hidden states after the final norm, its outer model turns them into logits. The
outer model is called as it is (it may scale or cap its logits) and the hidden states are taken by watching the
inner one, so any architecture of mlx-lm works as a target; heads need the hidden states, nothing else does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mtplab.errors import ModelError
from mtplab.models import cache as caches
from mtplab.models.tap import tap

FINAL_NORMS = ("norm", "norm_f", "hyper_connection_mixer")  # the last mixes streams of hidden states into one
EMBEDDINGS = ("embed_tokens", "wte", "embeddings", "tok_embeddings", "word_embeddings")


@dataclass(slots=True)
class Output:
    """One block's result, lazy until evaluated."""

    logits: mx.array  # [L, V]
    # [L, D] after the final norm or, if the target was told so, before it: [L, S D] where a hidden state is S streams
    hidden: mx.array | None


class Tape:
    """The inputs of every layer with recurrent state during an attempt, so that it can run again on fewer rows."""

    def __init__(self, layers: list[nn.Module], recurrent: list[int]):
        self.layers, self.calls, self.recording = layers, {}, False
        for i in recurrent:
            tap(layers[i], lambda args, kwargs, _out, i=i: self._record(i, args, kwargs))

    def _record(self, i: int, args: tuple, kwargs: dict) -> None:
        if self.recording:
            self.calls[i] = (args, kwargs)

    def start(self) -> None:
        self.calls, self.recording = {}, True

    def stop(self) -> None:
        self.calls, self.recording = {}, False

    def replay(self, i: int, rows: int) -> None:
        """Run layer i over the first `rows` rows of its recorded input; only its cache is of interest."""
        args, kwargs = self.calls[i]
        self.recording = False
        self.layers[i](*(first_rows(a, rows) for a in args), **{k: first_rows(v, rows) for k, v in kwargs.items()})
        self.recording = True


def with_cache(model: nn.Module, count: int) -> list[nn.Module]:
    """The layers in the order of their `count` caches: Nemotron-H has layers that keep none, and the last layers of
    Gemma 3n and 4 read what earlier ones keep."""
    return [x for x in model.layers if getattr(x, "block_type", "*") in ("M", "*")][:count]


def first_rows(value: Any, rows: int) -> Any:
    """Activations [1, L, D] and token ids [1, L] cut to `rows`; everything else (cache, None) as it is."""
    if isinstance(value, mx.array):
        ids = value.ndim == 2 and mx.issubdtype(value.dtype, mx.integer)
        if value.ndim != 3 and not ids:
            raise ModelError("a recurrent layer was called with a mask, so its state cannot be rolled back")
        return value[:, :rows]
    return value


class Target:
    """See the module. `hidden` chooses what `Output.hidden` holds: "post" (after the final norm) or "pre"."""

    def __init__(
        self,
        model: nn.Module,
        *,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        max_kv_size: int | None = None,
        hidden: str = "post",
    ):
        self.model, self.hidden = model, hidden
        self._options = {"kv_bits": kv_bits, "kv_group_size": kv_group_size, "max_kv_size": max_kv_size}
        outer = getattr(model, "language_model", model)
        self.inner = next((m for n in ("model", "backbone", "transformer") if (m := getattr(outer, n, None))), None)
        self.outer = outer
        self._seen: mx.array | None = None
        if self.inner is not None:
            watched = self.inner if hidden == "post" else self._final_norm()
            take = (lambda a, k, out: self._see(out)) if hidden == "post" else (lambda a, k, out: self._see(a[0]))
            tap(watched, take)
        fresh = self._fresh()
        recurrent = [
            i for i, layer in enumerate(fresh) if any(caches.kind(x) == "state" for x in caches.flatten(layer))
        ]
        self.tape = Tape(with_cache(model, len(fresh)), recurrent) if recurrent else None
        self.cache_kinds = [[caches.kind(x) for x in caches.flatten(layer)] for layer in fresh]

    def _final_norm(self) -> nn.Module:
        norm = next((m for n in FINAL_NORMS if (m := getattr(self.inner, n, None)) is not None), None)
        if norm is None:
            raise ModelError("hidden='pre' needs a final norm called `norm`, which this model does not have")
        return norm

    def _see(self, value: Any) -> None:
        self._seen = value if isinstance(value, mx.array) else None

    def _fresh(self) -> list[Any]:
        lm = caches.cache_module()
        return caches.adapt(lm.make_prompt_cache(self.model), **self._options)

    def new_cache(self) -> caches.Cache:
        return caches.Cache(self._fresh(), self.tape)

    def forward(self, tokens: mx.array, cache: caches.Cache) -> Output:
        """Feed a block. tokens: [L] int -> logits [L, V], hidden [L, D]; the cache grows by L rows."""
        out = self.forward_batch(tokens[None], cache)
        return Output(out.logits[0], None if out.hidden is None else out.hidden[0])

    def forward_batch(self, tokens: mx.array, cache: caches.Cache) -> Output:
        """Feed a block of several sequences of one length. tokens: [B, L] -> logits [B, L, V], hidden [B, L, D]."""
        cache.make_room(tokens.shape[1])
        logits = self.model(tokens, cache=cache.layers)
        cache.length += tokens.shape[1]
        hidden, self._seen = self._seen, None
        return Output(logits, hidden)

    @property
    def vocab(self) -> int | None:
        """Rows of the embedding, the ids that may be fed: MLX reads past its end without a word. None: not found."""
        found = next((m for n in EMBEDDINGS if (m := getattr(self.inner, n, None)) is not None), None)
        weight = getattr(found, "weight", None)
        return None if weight is None else weight.shape[0]

    @property
    def embedding(self) -> nn.Module:
        found = next((m for n in EMBEDDINGS if (m := getattr(self.inner, n, None)) is not None), None)
        if found is None:
            raise ModelError("this model has no `embed_tokens`, so an MTP head cannot share its embedding")
        return found

    def embed(self, tokens: mx.array) -> mx.array:
        """tokens: [L] -> [L, D]."""
        return self.embedding(tokens)

    def _unembedding(self) -> nn.Module:
        head = getattr(self.outer, "lm_head", None)
        return self.embedding if head is None else head

    def unembedding_size(self) -> int:
        """Rows of the unembedding matrix: the ids that logits are about."""
        return self._unembedding().weight.shape[0]

    def unembedding_rows(self, ids: mx.array) -> mx.array:
        """The rows of the unembedding matrix for some tokens, as floats. ids: [n] -> [n, D]."""
        head = self._unembedding()
        if "scales" not in head:
            return head.weight[ids]
        biases = head["biases"][ids] if "biases" in head else None
        kind = {"group_size": head.group_size, "bits": head.bits, "mode": head.mode}
        return mx.dequantize(head.weight[ids], head.scales[ids], biases, **kind)

    def unembed(self, hidden: mx.array) -> mx.array:
        """hidden after the final norm: [L, D] -> logits [L, V]."""
        head = getattr(self.outer, "lm_head", None)
        return self.embedding.as_linear(hidden) if head is None else head(hidden)

    @property
    def unembedding(self) -> nn.Module:
        """The module that `unembed` uses: `lm_head`, or the embedding where the two are tied."""
        return getattr(self.outer, "lm_head", None) or self.embedding
