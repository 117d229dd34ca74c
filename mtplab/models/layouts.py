"""Published layouts of a decoder block -> the names of mlx-lm's module.

mlx-lm does this for the layers it loads, in each architecture's `sanitize`, which drops the MTP head. So the head's
blocks are brought into shape here: experts one by one, fused or stacked; MLA's joint kv projection; blockwise fp8;
Step's names. Everything works on one block's tensors under their names inside the block, and only renames, stacks
or splits: a name that is not known here stays and is then a left-over, which is an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import mlx.core as mx

from mtplab.errors import ModelError

Tensors = dict[str, mx.array]

EXPERT = re.compile(r"((?:.*\.)?)experts\.(\d+)\.(\w+)\.(weight|scales|biases)")
FUSED = re.compile(r"((?:.*\.)?)(?:experts|switch_mlp)\.(gate_up_proj|up_proj|down_proj)(?:\.(weight|scales|biases))?")
STEP = (
    (r"^moe\.(gate|up|down)_proj\.", r"mlp.switch_mlp.\1_proj."),
    (r"^moe\.gate\.", "mlp.gate.gate."),
    (r"^moe\.router_bias$", "mlp.gate.router_bias"),
    (r"^share_expert\.", "mlp.share_expert."),
)
FP8_BLOCK = 128


def to_module_names(stored: Tensors, wanted: Collection[str], args: Any, where: str) -> Tensors:
    """One block's tensors under mlx-lm's names.

    `wanted` are the parameter names of the module (they tell SwitchGLU from SwitchMLP), `where` the block's name in
    the checkpoint, for errors.
    """
    out = {_step(n): a for n, a in stored.items() if not n.endswith("rotary_emb.inv_freq")}
    return _split_kv(experts(out, wanted, where), args)


def experts(tensors: Tensors, wanted: Collection[str], where: str) -> Tensors:
    """Numbered and fused experts -> stacked projections (`switch_mlp`)."""
    return _split_fused(_stack_experts(tensors, wanted, where), wanted, where)


def _step(name: str) -> str:
    for old, new in STEP:
        name = re.sub(old, new, name)
    return name


def from_fp8(tensors: Mapping[str, mx.array]) -> Tensors:
    """fp8 weights with one scale per 128 x 128 block -> bfloat16, everything else as it is."""
    out = {n: a for n, a in tensors.items() if not n.endswith("weight_scale_inv")}
    for name, scale in tensors.items():
        stem = name.removesuffix("_scale_inv")
        if stem == name:
            continue
        if stem not in out:
            raise ModelError(f"{name} is the scale of a weight that is missing")
        rows, cols = out[stem].shape
        if scale.shape != (-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK)):
            raise ModelError(f"{name} has shape {list(scale.shape)}, which does not fit {stem}")
        wide = mx.repeat(mx.repeat(scale, FP8_BLOCK, axis=0), FP8_BLOCK, axis=1)[:rows, :cols]
        out[stem] = (mx.from_fp8(out[stem], dtype=mx.bfloat16) * wide).astype(mx.bfloat16)
    return out


def _switch_name(base: str, projection: str, suffix: str, wanted: Collection[str]) -> str:
    """Where mlx-lm keeps a stacked projection: SwitchGLU has gate, up, down; SwitchMLP has fc1 and fc2."""
    plain = {"up_proj": "fc1", "down_proj": "fc2"}
    if f"{base}switch_mlp.fc1.weight" in wanted and projection in plain:
        projection = plain[projection]
    return f"{base}switch_mlp.{projection}.{suffix}"


def _stack_experts(tensors: Tensors, wanted: Collection[str], where: str) -> Tensors:
    out, groups = {}, {}
    for name, a in tensors.items():
        found = EXPERT.fullmatch(name)
        if found is None:
            out[name] = a
        else:
            base, number, projection, suffix = found.groups()
            groups.setdefault((base, projection, suffix), {})[int(number)] = a
    for (base, projection, suffix), parts in groups.items():
        gaps = sorted(set(range(max(parts) + 1)) - set(parts))
        if gaps:
            raise ModelError(f"the MTP head lacks {where}.{base}experts.{gaps[0]}.{projection}.{suffix}")
        shapes = {a.shape for a in parts.values()}
        if len(shapes) > 1:
            raise ModelError(f"the experts of {where}.{base}experts.*.{projection}.{suffix} differ in shape")
        out[_switch_name(base, projection, suffix, wanted)] = mx.stack([parts[i] for i in range(len(parts))])
    return out


def _split_fused(tensors: Tensors, wanted: Collection[str], where: str) -> Tensors:
    """experts.gate_up_proj [E, 2I, D] (gate first) and experts.down_proj, with or without `.weight`."""
    out = {}
    for name, a in tensors.items():
        found = FUSED.fullmatch(name)
        if found is None or name in wanted:
            out[name] = a
            continue
        base, projection, suffix = found[1], found[2], found[3] or "weight"
        if projection != "gate_up_proj":
            out[_switch_name(base, projection, suffix, wanted)] = a
            continue
        if a.ndim != 3 or a.shape[1] % 2:
            raise ModelError(f"{where}.{name} has shape {list(a.shape)}; gate and up of all experts are needed")
        half = a.shape[1] // 2
        out[f"{base}switch_mlp.gate_proj.{suffix}"] = a[:, :half]
        out[f"{base}switch_mlp.up_proj.{suffix}"] = a[:, half:]
    return out


def _split_kv(tensors: Tensors, args: Any) -> Tensors:
    """MLA: kv_b_proj [heads * (nope + v), rank] -> embed_q [heads, rank, nope] and unembed_out [heads, v, rank]."""
    stem = "self_attn.kv_b_proj"
    if f"{stem}.weight" not in tensors or getattr(args, "kv_lora_rank", None) is None:
        return tensors
    out = {n: a for n, a in tensors.items() if not n.startswith(stem + ".")}
    weight, pack = _unpacked(stem, tensors, args.kv_lora_rank)
    joint = weight.reshape(args.num_attention_heads, args.qk_nope_head_dim + args.v_head_dim, -1)
    nope = args.qk_nope_head_dim
    parts = {"embed_q": mx.contiguous(joint[:, :nope].swapaxes(-1, -2)), "unembed_out": mx.contiguous(joint[:, nope:])}
    for part, a in parts.items():
        out |= {f"self_attn.{part}.{suffix}": x for suffix, x in pack(a).items()}
    return out


def _unpacked(stem: str, tensors: Tensors, dims: int) -> tuple[mx.array, Callable[[mx.array], Tensors]]:
    """(the weight as floats, how to store its parts): affine parts are packed again as mlx-lm does for the trunk."""
    weight, scales = tensors[f"{stem}.weight"], tensors.get(f"{stem}.scales")
    if scales is None:
        return weight, lambda a: {"weight": a}
    bits, group = weight.shape[-1] * 32 // dims, dims // scales.shape[-1]
    if scales.dtype == mx.uint8:
        mode = {(4, 32): "mxfp4", (8, 32): "mxfp8", (4, 16): "nvfp4"}.get((bits, group), "mxfp4")
        return mx.dequantize(weight, scales, group_size=group, bits=bits, mode=mode), lambda a: {"weight": a}

    def pack(a: mx.array) -> Tensors:
        return dict(zip(("weight", "scales", "biases"), mx.quantize(a, group_size=group, bits=bits), strict=True))

    plain = mx.dequantize(weight, scales, tensors.get(f"{stem}.biases"), group_size=group, bits=bits)
    return plain, pack
