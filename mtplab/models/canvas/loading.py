"""A canvas checkpoint -> a `Denoiser`, strictly.

Every tensor of the text model is loaded under its name, float or packed, module by module as the tensors say; a
missing, left-over, misshapen or non-finite one stops the load with its name. Vision tensors are left out and counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mtplab.errors import ModelError, RequestError
from mtplab.models import headers, loader
from mtplab.models.canvas.base import Denoiser
from mtplab.models.canvas.defaults import read_defaults
from mtplab.models.canvas.layers import FEW_EXPERTS, Stacked
from mtplab.models.canvas.names import FAMILIES, Sorted, is_canvas, sort_names
from mtplab.models.heads import stored_kind
from mtplab.models.tokenizer import Tokenizer


def denoiser_class(model_type: str) -> type:
    """The module that runs a family."""
    if model_type == "diffusion_gemma":
        from mtplab.models.canvas.gemma import GemmaDenoiser

        return GemmaDenoiser
    from mtplab.models.canvas.llada import LladaDenoiser

    return LladaDenoiser


def load(name: str | Path, *, dtype: str | None = None) -> Denoiser:
    """Load a checkpoint folder or hub id. `dtype`: as in `load_target`. Raises ModelError or RequestError."""
    folder = loader.resolve(name)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json, so it is not a checkpoint folder")
    config, tensors = headers.read_json(folder / "config.json"), headers.read_headers(folder)
    kind = config.get("model_type")
    if not is_canvas(kind):
        raise ModelError(
            f"{folder} is {kind!r}, which is no canvas model ({', '.join(FAMILIES)}); "
            "autoregressive checkpoints go to generate and sweep"
        )
    cast = loader.choose_dtype(dtype)
    denoiser: Denoiser = denoiser_class(kind)(config)
    found = sort_names(kind, tensors)
    weights = loader.read_tensors(
        folder, tensors, {n for group in found.text.values() for n in group} | set(found.copies)
    )
    _fill(denoiser.model, found, weights, config)
    check_dtype(denoiser.model, cast)
    loader._cast(denoiser.model, cast)
    mx.eval(denoiser.model.parameters())
    if sum(a.nbytes for _, a in tree_flatten(denoiser.model.parameters())) <= loader.NAN_CHECK_BYTES:
        refuse_nan(denoiser.model, found)
    denoiser.folder, denoiser.tokenizer = folder, Tokenizer(folder, config)
    denoiser.defaults, denoiser.default_sources = read_defaults(folder, config, denoiser.canvas)
    denoiser.facts |= facts(denoiser, found, kind, "as stored" if cast is None else str(cast).split(".")[-1])
    return denoiser


def check_dtype(model: nn.Module, cast: mx.Dtype | None) -> None:
    """On the CPU mlx gathers experts in float32 only; packed ones are another product."""
    gathered = any(type(m) is Stacked and m.weight.shape[0] > FEW_EXPERTS for m in model.modules())
    if gathered and cast is not None and cast != mx.float32 and mx.default_device() == mx.Device(mx.cpu):
        name = str(cast).split(".")[-1]
        raise RequestError(
            f"dtype {name} cannot be honoured: on the CPU these experts run in float32 only; leave it out"
        )


def _fill(model: nn.Module, found: Sorted, weights: dict[str, mx.array], config: dict[str, Any]) -> None:
    """Pack the modules that the file stores packed, compare names and shapes, load."""
    stored = {path: _stack(path, [weights[n] for n in names]) for path, names in found.text.items()}

    def packed(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in stored or not hasattr(module, "to_quantized"):
            return False
        how = stored_kind(path, module.weight.shape[-1], stored, config)
        if (how["mode"] == "affine") != (f"{path}.biases" in stored):
            word = "lacks" if how["mode"] == "affine" else "has"
            raise ModelError(
                f"{path} is packed as {how['mode']} but {word} {path}.biases; convert the checkpoint again"
            )
        return how

    nn.quantize(model, class_predicate=packed)
    wanted = dict(tree_flatten(model.parameters()))
    missing, left = sorted(set(wanted) - set(stored)), sorted(set(stored) - set(wanted))
    if missing:
        raise ModelError(f"the checkpoint lacks {_listing(missing)}; does config.json belong to these files?")
    if left:
        raise ModelError(f"the checkpoint has tensors that nobody uses: {_listing([found.text[p][0] for p in left])}")
    for path, array in wanted.items():
        if stored[path].shape != array.shape:
            shapes = f"{list(stored[path].shape)}, the config asks for {list(array.shape)}"
            raise ModelError(f"{found.text[path][0]} has shape {shapes}")
    for name, path in found.copies.items():
        if path not in stored or not mx.array_equal(weights[name], stored[path]):
            raise ModelError(f"{name} should repeat {path} but differs from it; this model ties them")
    model.load_weights(list(stored.items()), strict=True)
    model.eval()


def _stack(path: str, parts: list[mx.array]) -> mx.array:
    """One tensor, or those of all experts of a layer."""
    if len(parts) == 1 and ".mlp.experts." not in path:
        return parts[0]
    if len({a.shape for a in parts}) > 1:
        raise ModelError(f"the experts of {path} differ in shape: {sorted({tuple(a.shape) for a in parts})}")
    return parts[0] if parts[0].ndim == 3 else mx.stack(parts)


def _listing(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def refuse_nan(model: nn.Module, found: Sorted) -> None:
    flags = {n: mx.isfinite(a).all() for n, a in tree_flatten(model.parameters())}
    mx.eval(flags)
    bad = sorted(n for n, ok in flags.items() if not ok.item())
    if bad:
        raise ModelError(f"weight {found.text[bad[0]][0]} is not finite (NaN or infinity); the file is damaged")


def facts(denoiser: Denoiser, found: Sorted, kind: str, dtype: str) -> dict[str, Any]:
    """What a record says about the model."""
    sizes = [int(a.nbytes) for _, a in tree_flatten(denoiser.model.parameters())]
    return {
        "model": denoiser.folder.name,
        "model_type": kind,
        "weight_bytes": sum(sizes),
        "quantized": any(path.endswith(".scales") for path in found.text),
        "dtype": dtype,
        "context": denoiser.context,
        "canvas": denoiser.canvas,
        "start": denoiser.start,
        "self_conditioning": denoiser.self_conditioning,
        "commit_order": denoiser.commit_order,
        "vision_tensors_left_out": len(found.vision),
    }
