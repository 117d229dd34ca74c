"""The Gemma 4 assistant: a drafter of its own checkpoint whose layers read the target's keys and values.

It has no state. One row goes in, concat(embedding * scale, hidden), both of the target; every layer attends to the KV
of the target's last layer of the same type; what comes out is the next hidden (through `post_projection`) and logits
over its own tied embedding. All drafts of a chain are made at one position, that of the last committed token.

Of a sliding layer it reads the rows that the target's window holds, and no row that was rejected (transformers' loop
looks at up to one of each).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mtplab.errors import ModelError
from mtplab.models import cache as caches
from mtplab.models import configs, headers, kinds, mlxlm
from mtplab.models.target import Target

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
Shared = dict[str, tuple[mx.array, mx.array]]


class OrderedEmbedding(nn.Module):
    """Logits of the tokens of the best centroids only; all others get a value below every one of them."""

    def __init__(self, dim: int, vocab: int, centroids: int, top: int):
        super().__init__()
        self.centroids = nn.Linear(dim, centroids, bias=False)
        self.token_ordering = mx.arange(vocab)
        self._top, self._shape = top, (centroids, vocab // centroids)

    def __call__(self, hidden: mx.array, table: mx.array) -> mx.array:
        """hidden: [m, D], table: [V, D] -> [m, V]."""
        best = mx.argpartition(self.centroids(hidden), kth=-self._top, axis=-1)[..., -self._top :]
        ids = self.token_ordering.reshape(self._shape)[best].reshape(hidden.shape[0], -1)
        found = (table[ids] @ hidden[..., None])[..., 0]
        rest = mx.broadcast_to(found.min() - 1.0, (hidden.shape[0], table.shape[0]))
        return mx.put_along_axis(rest, ids, found, axis=-1)


class Assistant(nn.Module):
    """See the module. Parameter names are those of the published checkpoint."""

    def __init__(self, config: dict[str, Any], target: Target):
        super().__init__()
        from mlx_lm.models import gemma4_text

        text = {k: v for k, v in config["text_config"].items() if v is not None}
        text["num_kv_shared_layers"] = text["num_hidden_layers"]
        args = gemma4_text.ModelArgs.from_dict(text)
        width = config.get("backbone_hidden_size", 1536)
        self.model = gemma4_text.Gemma4TextModel.__new__(gemma4_text.Gemma4TextModel)
        nn.Module.__init__(self.model)
        self.model.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.model.layers = [gemma4_text.DecoderLayer(args, i) for i in range(args.num_hidden_layers)]
        self.model.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.pre_projection = nn.Linear(2 * width, args.hidden_size, bias=False)
        self.post_projection = nn.Linear(args.hidden_size, width, bias=False)
        if config.get("use_ordered_embeddings"):
            self.masked_embedding = OrderedEmbedding(
                args.hidden_size,
                args.vocab_size,
                config.get("num_centroids", 2048),
                config.get("centroid_intermediate_top_k", 32),
            )
        self._target, self._window = target, args.sliding_window
        self._producers = producers(target, args.layer_types)
        self._scale = target.inner.embed_scale
        table = target.embedding.weight.shape[0]
        if target.inner.config.hidden_size != width or args.vocab_size > table:
            raise ModelError(
                f"this assistant is for a target of width {width} with {args.vocab_size} tokens, but the target has "
                f"{target.inner.config.hidden_size} and {table}"
            )

    def effective(self) -> dict[str, Any]:
        """What drafts, for the record."""
        return {
            "family": "gemma4_assistant",
            "layers": len(self.model.layers),
            "fusion": "eh",
            "hidden": "post",
            "recursion": "post_projection",
            "reads": dict(self._producers),
        }

    @property
    def file_names(self) -> dict[str, str]:
        """Name in the checkpoint of every parameter path: the same."""
        return {path: path for path, _ in tree_flatten(self.parameters())}

    def shared(self, cache: caches.Cache) -> Shared:
        """The target's KV rows per layer type, in temporal order, of a sliding window the window."""
        out = {}
        for kind, i in self._producers.items():
            (leaf,) = caches.flatten(cache.layers[i])
            if leaf.keys is None:
                raise ModelError("the target's cache is empty, so there is nothing for the assistant to read")
            rows = leaf.offset
            if caches.kind(leaf) == "window":
                rows = min(rows, leaf.max_size)
                pair = [leaf._temporal_order(a)[..., -rows:, :] for a in (leaf.keys, leaf.values)]
            else:
                pair = [a[..., :rows, :] for a in (leaf.keys, leaf.values)]
            out[kind] = tuple(pair)
        return out

    def step(self, token: mx.array, hidden: mx.array, shared: Shared, position: int) -> tuple[mx.array, mx.array]:
        """token: [1], hidden: [1, D] of the target -> next hidden [1, D], logits [1, V]."""
        embedded = self._target.embed(token) * self._scale
        x = self.pre_projection(mx.concatenate([embedded, hidden], axis=-1))[None]
        for layer in self.model.layers:
            keys, values = shared[layer.layer_type]
            if layer.layer_type == "sliding_attention":
                keys, values = keys[..., -self._window :, :], values[..., -self._window :, :]
            x, _, _ = layer(x, None, None, shared_kv=(keys, values), offset=position)
        x = self.model.norm(x)[0]
        table = self.model.embed_tokens
        logits = self.masked_embedding(x, _floats(table)) if "masked_embedding" in self else table.as_linear(x)
        return self.post_projection(x), logits


def _floats(table: nn.Module) -> mx.array:
    if not hasattr(table, "scales"):
        return table.weight
    return mx.dequantize(
        table.weight, table.scales, table.get("biases"), group_size=table.group_size, bits=table.bits, mode=table.mode
    )


def producers(target: Target, layer_types: list[str]) -> dict[str, int]:
    """Layer type -> the target's last layer of that type that keeps keys and values."""
    layers = getattr(target.inner, "layers", [])
    if not hasattr(target.inner, "embed_scale") or not all(hasattr(x, "layer_type") for x in layers):
        raise ModelError(f"a Gemma 4 assistant reads a Gemma 4 target, not {type(target.outer).__module__}")
    kept = {x.layer_type: i for i, x in enumerate(layers) if x.self_attn.has_kv}
    missing = sorted(set(layer_types) - set(kept))
    if missing:
        raise ModelError(f"the target keeps no keys and values of type {', '.join(missing)}, which the assistant reads")
    return {kind: kept[kind] for kind in sorted(set(layer_types))}


def load_assistant(folder: Path, target: Target) -> Assistant:
    """The assistant of a target from its folder, strictly: names, shapes and kinds as for any head."""
    config, tensors = headers.read_json(folder / "config.json"), headers.read_headers(folder)
    if config.get("model_type") not in MODEL_TYPES:
        raise ModelError(f"{folder} is no Gemma 4 assistant: its model_type is {config.get('model_type')!r}")
    if not isinstance(config.get("text_config"), dict):
        said = configs.shown(config.get("text_config"))
        raise ModelError(f"{folder}/config.json has text_config = {said}; it must be an object")
    configs.check_sizes(config, tensors, f"{folder}/config.json")
    kinds.check_files(tensors, config, set())
    mlxlm.light()
    try:
        model = Assistant(config, target)
    except ModelError:
        raise
    except Exception as error:  # mlx-lm's code on somebody's config: anything may come
        why = " ".join(str(error).split())[:200]
        raise ModelError(f"{folder}/config.json does not describe an assistant: {why}") from error
    weights: dict[str, mx.array] = {}
    for file in sorted({t.file for t in tensors.values()}):
        weights |= mx.load(str(folder / file))
    weights = {n: a for n, a in weights.items() if n != "lm_head.weight" and "rotary_emb" not in n}

    def kind(path: str, module: nn.Module) -> bool | dict:
        if f"{path}.scales" not in weights or not hasattr(module, "to_quantized"):
            return False
        return kinds.stored_kind(path, module.weight.shape[-1], weights, config)

    nn.quantize(model, class_predicate=kind)
    try:
        model.load_weights(list(weights.items()), strict=True)
    except ValueError as error:
        raise ModelError(f"{folder} does not fit its config.json: {' '.join(str(error).split())[:300]}") from error
    if "masked_embedding" in model:
        order = weights["masked_embedding.token_ordering"]
        whole = mx.issubdtype(order.dtype, mx.integer) and mx.array_equal(mx.sort(order), mx.arange(order.size)).item()
        if not whole:
            # It indexes tables: an id too large would reach the memory behind them.
            raise ModelError(f"{folder}: masked_embedding.token_ordering is no permutation of the vocabulary")
    model.eval()
    return model
