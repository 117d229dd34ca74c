"""A new head for a trunk, and its folder: MiMo's names beside a config, with a card."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mtplab import __version__
from mtplab.errors import ModelError
from mtplab.models import configs, headfile, heads, headspec, mlxlm
from mtplab.models.headers import read_json
from mtplab.models.loader import Loaded, context_length
from mtplab.train.plan import HeadPlan
from mtplab.trials.files import explained, write_json, write_text

FAMILY = "mimo"  # attention with biases, SwiGLU, RMSNorm: no head is simpler, and it needs nothing of the trunk's class


def head_config(trunk: dict[str, Any], ffn: int | None = None) -> dict[str, Any]:
    """A one-layer MiMo head that fits a trunk: its width, and its attention's shape where that divides the width."""
    configs.check(trunk, "the trunk's config.json")
    c = trunk | configs.text_of(trunk)
    dim = c.get("hidden_size")
    if not isinstance(dim, int):
        raise ModelError("the trunk's config.json has no hidden_size, so no head can be shaped for it")
    heads_, kv = _attention(dim, c.get("num_attention_heads"), c.get("num_key_value_heads"))
    theta = c.get("rope_theta") or (c.get("rope_parameters") or {}).get("rope_theta")
    width = c.get("intermediate_size")
    return {
        "architectures": ["MiMoForCausalLM"],
        "model_type": FAMILY,
        "hidden_size": dim,
        "num_hidden_layers": 0,
        "intermediate_size": ffn or (width if configs.whole(width, 1) else 4 * dim),  # some list one per layer
        "num_attention_heads": heads_,
        "num_key_value_heads": kv,
        "rms_norm_eps": c.get("rms_norm_eps") or 1e-5,
        "vocab_size": c.get("vocab_size"),
        "max_position_embeddings": context_length(trunk),
        "rope_theta": theta if configs.positive(theta) else 10000.0,
        "tie_word_embeddings": True,
        "num_nextn_predict_layers": 1,
        "torch_dtype": "float16",
        headfile.ABOUT: {"trunk": headfile.identity(trunk), "made_by": f"mtplab {__version__}"},
    }


def _attention(dim: int, wanted: Any, kv: Any) -> tuple[int, int]:
    """(heads, key-value heads): the trunk's, if its heads divide the width evenly, else heads of about 64."""
    if isinstance(wanted, int) and wanted > 0 and dim % wanted == 0 and dim // wanted % 2 == 0:
        return wanted, kv if isinstance(kv, int) and kv > 0 and wanted % kv == 0 else wanted
    size = next((s for s in (64, 32, 16, 8, 4, 2) if dim % s == 0), None)
    if size is None:
        raise ModelError(f"the trunk's width {dim} is odd, so it cannot be cut into attention heads")
    return dim // size, dim // size


def new_head(loaded: Loaded, ffn: int | None = None) -> tuple[heads.Head, dict[str, Any]]:
    """An untrained head on a loaded trunk, in float32, and its config."""
    config = head_config(read_json(loaded.folder / "config.json"), ffn)
    spec = headspec.find_spec(config)
    head = heads.Head(spec, mlxlm.classes(config)[1].from_dict(config), 1, loaded.target)
    head.set_dtype(mx.float32)
    return head, config


def write_head(folder: Path, head: heads.Head, config: dict[str, Any], card: str) -> None:
    """The head folder, whole or not at all; an older one in its place goes."""
    names = heads.expected_names(head.spec, head, head.spec.prefixes[0])
    params = dict(tree_flatten(head.parameters()))
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    try:
        with explained(folder):
            fresh.mkdir(parents=True)
            half = {name: params[path].astype(mx.float16) for name, path in names.items()}
            mx.save_safetensors(str(fresh / "model.safetensors"), half, {"format": "mlx"})
            write_json(fresh / "config.json", config)
            write_text(fresh / "README.md", card)
            if folder.exists():
                shutil.rmtree(folder)
            os.rename(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def card(plan: HeadPlan, config: dict[str, Any], curve: list[dict[str, Any]], parameters: int) -> str:
    """The head's card: what it is for, how it was made, what it was measured to do."""
    last, trunk = curve[-1], config[headfile.ABOUT]["trunk"]
    rows = [("held-out text", "text"), ("own continuations of held-out text", "own")]
    lines = [f"| {name} | {_depths(last[f'match_{k}'])} | {_depths(last[f'overlap_{k}'])} |" for name, k in rows]
    return "\n".join(
        [
            f"# An MTP head for {Path(plan.model).name}",
            "",
            f"One layer of {parameters:,} parameters in MiMo's format (float16), for a {trunk['model_type']} trunk of "
            f"width {trunk['hidden_size']} with {trunk['num_hidden_layers']} layers, whose embedding and unembedding "
            "it shares. Use it with `--head` and this folder.",
            "",
            f"Trained by `mtplab head train` on the trunk's own text: {plan.rows} rows of {plan.length} tokens "
            f"begun by {', '.join(Path(c).name for c in plan.corpora)} (a quarter the text itself, a quarter greedy, "
            f"half at temperature {plan.temp}); {last['step']} steps, {last['tokens']:,} tokens, "
            f"chained {plan.depth} deep, trunk frozen, KL to the trunk's distribution.",
            "",
            f"Agreement with the trunk, teacher-forced, depths 1 to {plan.depth}, on {last['held_out_rows']} rows "
            "that were not trained on (other windows of the same texts):",
            "",
            "| | match | overlap |",
            "|---|---|---|",
            *lines,
            "",
        ]
    )


def _depths(values: list[float | None]) -> str:
    return " / ".join("-" if v is None else f"{v:.3f}" for v in values)
