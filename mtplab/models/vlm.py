"""Trunks that mlx-lm does not have, taken from mlx-vlm (the extra `vlm`).

One family so far: `qwen4_exp` (Qwen3.8-Flash-Next), text only. Its hidden state is several streams side by side, its
recurrent layers keep a convolution's and the n-gram table's history beside their own state, and its attention layers
keep the keys of an indexer that chooses what a row looks at. The modules are mlx-vlm's; what is here gives them the
surface of an mlx-lm model and caches that roll back. mlx-vlm is imported when a checkpoint asks for it, no sooner.
"""

from __future__ import annotations

import copy
import importlib
import re
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mtplab.errors import ModelError
from mtplab.models import layouts
from mtplab.models.mlxlm import cache_module, light, no_trunk

ROW_BY_ROW = 32  # rows of a block up to which a recurrent state goes row by row; longer ones are prefill
NGRAMS = "ngram_embedding."
PACKAGES = ("", ".speculative", *(f".models.{n}" for n in ("qwen3_vl", "qwen3_5", "qwen3_5_moe", "qwen4_exp")))
VISION = re.compile(r"(model\.)?(language_model\.)?(visual|vision_tower)\.")
NAMES = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"\.ngram_embedding\.shard_(\d+)\.", r".ngram_embedding.shards.\1."),
)


def part(name: str) -> ModuleType:
    """A file of mlx-vlm's `qwen4_exp` ("language", "config", "fp8"); a ModelError says what to install.

    The packages' own `__init__` files are not run: they bring image processors, and torch with them where it is
    installed, half a minute of every process.
    """
    why = no_trunk("qwen4_exp")
    if why is not None:
        raise ModelError(why)
    try:
        for package in PACKAGES:
            light(f"mlx_vlm{package}")
        return importlib.import_module(f"mlx_vlm.models.qwen4_exp.{name}")
    except ImportError as error:
        raise ModelError(f"mlx-vlm cannot be imported ({error}); run `pip install 'mtplab[vlm]'`") from error


def classes(config: dict[str, Any]) -> tuple[type, type]:
    """`(Model, ModelArgs)` for a config whose model_type is in `families.VLM`, used as mlx-lm's are."""
    language = part("language")

    class Args:
        @staticmethod
        def from_dict(found: dict[str, Any]) -> Any:
            return part("config").TextConfig.from_dict(copy.deepcopy(found["text_config"]))

    return lambda args: Trunk(language.LanguageModel(args)), Args  # type: ignore[return-value]


def check(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Refuse what cannot be honoured, and a table that the files do not hold: its primes are sought one by one."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ModelError("config.json has no text_config, which this family's published config has")
    if text.get("ple_storage"):
        raise ModelError("text_config.ple_storage names an n-gram table outside the checkpoint, which is not read here")
    tables = [text.get(k) for k in ("ngram_size", "heads_per_ngram", "ngram_vocab_size_base")]
    if not text.get("ple_layer_ids") or not all(type(n) is int for n in tables):
        return
    rows = sum(t.shape[0] for n, t in tensors.items() if NGRAMS in n and n.endswith(".weight") and len(t.shape) == 2)
    size, heads, base = tables
    if not 0 < (size - 1) * heads * base <= rows:
        raise ModelError(
            f"text_config wants an n-gram table of at least {size - 1} x {heads} x {base} rows, the files hold {rows}"
        )


class Trunk(nn.Module):
    """mlx-vlm's language model, called as mlx-lm's models are: tokens [B, L] and caches in, logits [B, L, V] out.

    mlx-vlm's own outer call keeps the positions of the last prompt on the module and takes another path for a single
    row than for a block; neither may be here, so its inner model is called.
    """

    def __init__(self, language_model: nn.Module):
        super().__init__()
        self.language_model = language_model

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Published names -> the modules': fp8 tensors as bfloat16, experts stacked, without the vision tower."""
        weights = layouts.experts(part("fp8").convert_qwen4_exp_fp8_weights(weights), (), "")
        tied = self.language_model.args.tie_word_embeddings
        out = {}
        for name, a in weights.items():
            if VISION.match(name) or (tied and name.endswith("lm_head.weight")):
                continue
            for old, new in NAMES:
                name = re.sub(old, new, name)
            # Published with the channels first.
            out[name] = a.moveaxis(2, 1) if name.endswith("conv1d.weight") and a.shape[-1] != 1 else a
        return out

    @property
    def layers(self) -> list[nn.Module]:
        return self.language_model.model.layers

    def make_cache(self) -> list[Any]:
        indexed, state = cache_classes()
        return [
            indexed() if not layer.is_linear else state(4 if "ple" in layer else 2)  # conv, delta, table's conv, ids
            for layer in self.layers
        ]

    def __call__(self, tokens: mx.array, cache: list[Any] | None = None) -> mx.array:
        hidden = self.language_model.model(tokens, cache=self.make_cache() if cache is None else cache)
        head = getattr(self.language_model, "lm_head", None)
        return self.language_model.model.embed_tokens.as_linear(hidden) if head is None else head(hidden)


@cache
def cache_classes() -> tuple[type, type]:
    """(keys and values with an indexer's keys, recurrent state): mlx-vlm's caches, known as mlx-lm's to the rest."""
    made, lm = part("language"), cache_module()

    class IndexedCache(made.QSAKVCache, lm.KVCache):
        """`index_keys` [1, L, D] and their positions beside the keys and values; `trim` cuts all of them."""

    class StateCache(made.ArraysCache, lm.ArraysCache):
        """A state that a block of a verify leaves with the bits of the same rows one at a time."""

        def update_recurrent(self, index: int, length: int, update: Any) -> Any:
            if not 1 < length <= ROW_BY_ROW:
                return super().update_recurrent(index, length, update)
            # Asked for the states in between, mlx-vlm goes row by row; its scan over chunks sums in another order.
            output, self.cache[index] = update(self.cache[index], length - 1)[:2]
            return output, self.cache[index]

    return IndexedCache, StateCache


# The MTP head's parts --------------------------------------------------------------------------------------------


def head_block(args: Any) -> nn.Module:
    """The decoder layer of an MTP head: one of attention, without a table. args: the trunk's text config."""
    made = part("language")

    class HeadBlock(made.Qwen4ExpDecoderLayer):
        def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
            return super().__call__(x, None, mask, cache_classes()[0]() if cache is None else cache, None)

    one = replace(args, num_hidden_layers=1, layer_types=["full_attention"], ple_layer_ids=[])
    return HeadBlock(one, 0)


def norm(dims: int, eps: float) -> nn.Module:
    """An RMS norm over all of [.., dims] that adds one to its weight."""
    return part("language").Qwen4ExpRMSNorm(dims, eps=eps)


def mixer(args: Any) -> nn.Module:
    """Streams [.., S D] -> one state [.., D], normed."""
    made = part("language")
    return made.Qwen4ExpGatedResidual(args, use_combine=False)
