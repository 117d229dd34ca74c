"""What a checkpoint holds, from its headers and config alone: no weight is loaded.

Only the norm weights of an MTP head (a few kilobytes) are read where their convention must be recognised.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mtplab.backend import machine
from mtplab.errors import ModelError
from mtplab.models import configs, families, footprint, headers, headfile, headspec, kinds, mlxlm
from mtplab.models.canvas import describe
from mtplab.models.canvas.names import is_canvas

# The modules of a plain attention layer, to which the block of a head in a folder of its own is compared.
PLAIN_BLOCK = {"input_layernorm", "post_attention_layernorm"} | {
    *(f"self_attn.{n}_proj" for n in "qkvo"), *(f"mlp.{n}_proj" for n in ("gate", "up", "down"))
}  # fmt: skip
NO_FIXED = "no: --verify fixed has no form for {}; use --verify serial"
NO_ROWWISE = "no: two modules of a layer write one cache, and one of them takes token ids; use --verify serial"
ROLES = ("embed_norm", "hidden_norm", "proj", "final_norm", "embed_proj", "unembed", "embed")
Tensors = Mapping[str, headers.TensorInfo]


def inspect_checkpoint(folder: Path | str) -> dict[str, Any]:
    """A JSON-able description: family, head, bytes by part, kinds, cache kinds, memory by context, what is possible."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json, so it is not a checkpoint folder")
    config, tensors = headers.read_json(folder / "config.json"), headers.read_headers(folder)
    spec = headspec.find_spec(config)
    head_names = set(headspec.head_names(spec, tensors)) if spec is not None else set()
    head, head_config = find_head(folder, spec, config, tensors, head_names)
    sizes = bytes_by_part(tensors, head_names)
    if head_config is not config:
        total = sizes.pop("total")
        sizes |= {"mtp head": head["bytes"], "total": total + head["bytes"]}
    problem = _problem(tensors, config, head_names)
    out = {
        "folder": folder.name,
        "model_type": config.get("model_type"),
        "files": len({t.file for t in tensors.values()}),
        "tensors": len(tensors),
        "parameters": parameter_count(tensors, config),
        "bytes": sizes,
        "dtypes": dict(Counter(t.dtype for t in tensors.values()).most_common()),
        "quantization": describe_quantization(config, tensors, head_names),
        "problem": problem,
        "context": footprint.context_of(config),
        "cache": footprint.describe_cache(config),
        "head": head,
    }
    if is_canvas(config.get("model_type")):
        return out | _canvas(folder, config, tensors, out)
    layers = head.get("layers", 0) if head["status"] == "present" else 0
    out["memory"] = footprint.memory_by_context(config, sizes["total"], layers, head_config=head_config)
    out["machine"] = machine.memory()
    out["arms"] = arms(out)
    out["verify"] = verify_modes(out)
    return out


def _problem(tensors: Tensors, config: dict, head: set[str]) -> str | None:
    try:
        configs.check(config)
        kinds.check_files(tensors, config, head)
    except ModelError as error:
        return str(error)
    kind = config.get("model_type")
    return mlxlm.no_trunk(kind) if isinstance(kind, str) else "config.json has no model_type"


def _canvas(folder: Path, config: dict[str, Any], tensors: Tensors, out: dict) -> dict[str, Any]:
    """The lines of a canvas checkpoint, and those that are different there."""
    how = "never needed: only finished canvases are written"
    used = out["bytes"]["total"] - out["bytes"].get("vision", 0)
    full = describe.kv_bytes_per_token(config)
    per = None if full is None else {"full": full, "latent": 0, "sliding": 0}
    return {
        "cache": {"layers": out["cache"]["layers"], "rollback": dict.fromkeys(out["cache"]["rollback"], how)},
        "canvas": describe.describe(folder, config, tensors),
        "memory": footprint.memory_by_context(config, used, 0, per=per, known=True),
        "machine": machine.memory(),
        "arms": describe.arms(config["model_type"]),
        "verify": {},
    }


def parameter_count(tensors: Tensors, config: dict[str, Any]) -> int:
    """Weights, with packed ones counted by their bits; scales and biases of quantization are not parameters."""
    total = 0
    for name, t in tensors.items():
        if name.endswith((".scales", ".biases")):
            continue
        bits = stored_bits(name, tensors, config)
        total += t.nbytes * 8 // bits if bits else t.nbytes // headers.ITEM_BYTES[t.dtype]
    return total


def stored_bits(name: str, tensors: Tensors, config: dict[str, Any]) -> int | None:
    """Bits per weight of a packed tensor (its module has scales), else None."""
    stem = name.removesuffix(".weight")
    if f"{stem}.scales" not in tensors or not name.endswith(".weight"):
        return None
    bits = stored_kind(stem, tensors, config).get("bits")
    return bits if type(bits) is int and bits > 0 else 4


def stored_kind(stem: str, tensors: Tensors, config: dict[str, Any]) -> dict[str, Any]:
    """{"mode", "bits", "group_size"} of a packed module. The float formats follow from the tensors; affine is the
    config's word, the module's own before the global one, where it fits the tensors, else bits are left out."""
    weight, scales = tensors[f"{stem}.weight"], tensors[f"{stem}.scales"]
    if not weight.shape or not scales.shape or not scales.shape[-1]:
        return {"mode": "unknown"}
    columns = weight.shape[-1], scales.shape[-1]
    if scales.dtype == "U8":
        for (bits, group), mode in kinds.FLOAT_MODES.items():
            if kinds.shapes_fit(*columns, bits, group):
                return {"mode": mode, "bits": bits, "group_size": group}
        return {"mode": "unknown"}
    for entry in (kinds.own_entries(config).get(kinds.bare(stem)), kinds.table(config)):
        bits, group = (entry.get("bits"), entry.get("group_size")) if isinstance(entry, Mapping) else (None, None)
        if type(bits) is int and type(group) is int and kinds.shapes_fit(*columns, bits, group):
            return {"mode": "affine", "bits": bits, "group_size": group}
    return {"mode": "affine"}


def kind_name(stem: str, tensors: Tensors, config: dict[str, Any]) -> str:
    """A module's kind in words: "affine 4-bit g64", "mxfp4", or the dtype of an unquantized weight."""
    if f"{stem}.scales" not in tensors or f"{stem}.weight" not in tensors:
        return tensors[f"{stem}.weight"].dtype if f"{stem}.weight" in tensors else tensors[stem].dtype
    kind = stored_kind(stem, tensors, config)
    if kind["mode"] != "affine":
        return kind["mode"]
    return f"affine {kind['bits']}-bit g{kind['group_size']}" if "bits" in kind else "affine, bits not declared"


def bytes_by_part(tensors: Tensors, head_names: set[str]) -> dict[str, int]:
    parts: Counter[str] = Counter()
    for name, t in tensors.items():
        parts[part_of(name, head_names)] += t.nbytes
    return dict(parts) | {"total": sum(parts.values())}


def part_of(name: str, head_names: set[str]) -> str:
    if name in head_names:
        return "mtp head"
    if "ngram_embedding" in name:
        return "n-gram table"
    if "visual" in name or "vision" in name or "audio" in name:
        return "vision"
    if "embed_tokens" in name or "wte" in name or ".embeddings." in name:
        return "embedding"
    return "unembedding" if "lm_head" in name else "trunk"


def describe_quantization(config: dict, tensors: Tensors, head_names: set[str]) -> dict[str, Any] | None:
    """The config's global kind and how many modules of each part are stored how; None for an unquantized checkpoint."""
    packed = {n.removesuffix(".scales") for n in tensors if n.endswith(".scales")}
    table = kinds.table(config)
    if not packed and not table:
        return None
    parts: dict[str, Counter[str]] = {}
    for name in tensors:
        stem = name.removesuffix(".weight")
        if stem != name and len(tensors[name].shape) > 1:
            parts.setdefault(part_of(name, head_names), Counter())[kind_name(stem, tensors, config)] += 1
    return {
        "default": {k: v for k, v in table.items() if not isinstance(v, (dict, list))},
        "modules_with_their_own": len(kinds.own_entries(config)),
        "packed": len(packed),
        "packed_in_head": sum(f"{p}.scales" in head_names for p in packed),
        "parts": {k: dict(v.most_common()) for k, v in parts.items()},
    }


def find_head(
    folder: Path, spec: headspec.HeadSpec | None, config: dict, tensors: Tensors, names: set[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(description, config it is read with) of the head that a load would take: the checkpoint's own, or the one in a
    folder of its own inside. Status "refused": a load with a head would end with `why`."""
    try:
        place = headfile.inside(folder, config, tensors)
        if place is None:
            return describe_head(folder, spec, config, tensors, names), config
        own, found = headfile.listed(place, config)
    except ModelError as error:
        return {"status": "refused", "why": str(error)}, config
    described = describe_head(place, headspec.find_spec(own), own, found, set(found))
    return {"folder": headfile.INSIDE, "bytes": 0, **described}, own


def describe_head(folder: Path, spec: Any, config: dict, tensors: Tensors, names: set[str]) -> dict[str, Any]:
    """Status "none", "present", "declared" (the config says so, no tensors), "undeclared" (tensors, but the config
    says 0) or "missing" (some tensors lack)."""
    if spec is None:
        kind = config.get("model_type")
        known = families.NO_HEAD.get(kind) if isinstance(kind, str) else None
        return {"status": "none", "why": known or f"no MTP head is known for model_type {kind!r}"}
    found = headspec.declared(spec, config)
    declared = None if found is None else found[1]
    out: dict[str, Any] = {"family": spec.family, "declared_layers": declared, "tensors": len(names)}
    if not names:
        status = "declared" if declared else "none"
        why = "config.json declares a head but its tensors are not in the files" if declared else "no head tensors"
        return out | {"status": status, "why": why}
    layers = declared or 1 + max((i for n in names if (i := headspec.layer_of(spec, n)) is not None), default=0)
    prefix = next((p for p in spec.prefixes if f"{spec.name('proj', p, 0)}.weight" in names), spec.prefixes[0])
    roles = head_roles(spec, prefix, layers, config, tensors, names)
    out |= {"files": sorted({tensors[n].file for n in names}), "bytes": sum(tensors[n].nbytes for n in names)}
    missing = missing_tensors(spec, prefix, layers, tensors, names)
    status, why = ("missing", f"the head lacks {', '.join(missing[:4])}") if missing else ("present", None)
    if declared == 0:
        status, why = "undeclared", f"the files hold head tensors but config.json says {found[0]} = 0"
    out |= {"status": status, "layers": layers, "missing": missing, "roles": roles, "spec": spec.effective()}
    out["norm_means"] = norm_means(folder, tensors, sorted(n for n in names if tensors[n].shape and "norm" in n))
    out["norm_convention"] = norm_convention(spec, out["norm_means"], headspec.raw_layout(spec, tensors))
    return out | ({"why": why} if why else {})


def head_roles(
    spec: headspec.HeadSpec, prefix: str, layers: int, config: dict, tensors: Tensors, names: set[str]
) -> dict[str, dict[str, Any]]:
    """Per role of the head: where its first tensor is, the shape as stored, the kind; the block's modules in one."""
    out: dict[str, dict[str, Any]] = {}
    for role in ROLES:
        stems = [spec.name(role, prefix, i) for i in range(layers)] if getattr(spec, role) else []
        present = [s for s in stems if f"{s}.weight" in names]
        if present:
            first = present[0]
            shape = list(tensors[f"{first}.weight"].shape)
            out[role] = {"name": first, "shape": shape, "kind": kind_name(first, tensors, config)}
    fixed = tuple(spec.name(r, prefix, i) + "." for r in ROLES if getattr(spec, r) for i in range(layers))
    block = [n for n in names if not n.startswith(fixed) and not n.endswith((".scales", ".biases"))]
    counted = Counter(kind_name(n.removesuffix(".weight"), tensors, config) for n in block if len(tensors[n].shape) > 1)
    out["block"] = {"name": spec.name("block", prefix, 0), "tensors": len(block), "kinds": dict(counted)}
    return out


def missing_tensors(spec: headspec.HeadSpec, prefix: str, layers: int, tensors: Tensors, names: set[str]) -> list[str]:
    """Fixed parts that lack a tensor, and modules that the trunk's most alike layer has and a head block has not."""
    missing, trunk = [], _trunk_layers(tensors, names) or ([PLAIN_BLOCK] if spec.family == "mimo" else [])
    for i in range(layers):
        for role in (r for r in ROLES[:5] if getattr(spec, r)):
            stem = spec.name(role, prefix, i)
            # The last norm of a head with streams is a module of several tensors.
            missing += [f"{stem}.weight"] if not any(n.startswith(f"{stem}.") for n in names) else []
        for b in range(len(spec.pattern or "x")):
            block = spec.name("block", prefix, i, b)
            own = _modules(n for n in names if n.startswith(block + "."))
            alike = max(trunk, key=lambda t, own=own: len(t & own) - len(t - own), default=set())
            missing += [f"{block}.{m}" for m in sorted(alike - own)]
    return sorted(set(missing))


def _trunk_layers(tensors: Tensors, head: set[str]) -> list[set[str]]:
    found: dict[str, list[str]] = {}
    for name in tensors:
        match = re.match(r"(.*?layers\.\d+)\.", name)
        if match and name not in head and "vision" not in name and "visual" not in name:
            found.setdefault(match[1], []).append(name)
    return [_modules(v) for v in found.values()]


def _modules(names: Iterable[str]) -> set[str]:
    """Module names inside a layer, whatever the layout of the experts and of MLA's joint projection."""
    out = set()
    for name in names:
        rest = re.sub(r"^.*?layers\.\d+\.", "", name)
        rest = re.sub(r"\.(weight|scales|biases|weight_scale_inv)$", "", rest)
        rest = re.sub(r"(^|\.)(?:experts\.\d+|experts|switch_mlp)\.", r"\1experts.", rest)
        for old, new in (("gate_up_proj", ("gate_proj", "up_proj")), ("kv_b_proj", ("embed_q", "unembed_out"))):
            if rest.endswith(old):
                out |= {rest.removesuffix(old) + n for n in new}
                break
        else:
            out.add(rest)
    return out


def norm_means(folder: Path, tensors: Tensors, names: Iterable[str]) -> dict[str, float | None]:
    """Mean of each norm weight, read straight from the file: near 0 is zero-centred, near 1 is shifted."""
    import numpy as np

    out: dict[str, float | None] = {}
    for name in names:
        t = tensors[name]
        if len(t.shape) != 1 or not t.shape[0]:
            continue
        raw = _bytes_of(folder / t.file, name)
        if t.dtype == "BF16":
            values = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif t.dtype in ("F16", "F32", "F64"):
            values = np.frombuffer(raw, {"F16": np.float16, "F32": np.float32, "F64": np.float64}[t.dtype])
        else:
            continue
        mean = float(values.astype(np.float64).mean())
        out[name] = round(mean, 4) if np.isfinite(mean) else None
    return out


def _bytes_of(path: Path, name: str) -> bytes:
    with open(path, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        begin, end = json.loads(f.read(length))[name]["data_offsets"]
        f.seek(8 + length + begin)
        return f.read(end - begin)


def norm_convention(spec: headspec.HeadSpec, means: Mapping[str, float | None], raw_trunk: bool) -> str:
    """How the head's norm weights are stored, in words."""
    known = [m for m in means.values() if m is not None]
    if not spec.zero_centred or not known:
        return "as used (the family stores them so)"
    mean = sum(known) / len(known)
    if raw_trunk:
        return "raw: zero-centred, as the trunk's layout says; one is added on loading"
    if headspec.RAW_BELOW <= mean <= headspec.SHIFTED_ABOVE:
        return f"not recognised (mean {mean:.2f}); say --head-norms raw or --head-norms shifted"
    return "raw: zero-centred, one is added on loading" if mean < headspec.RAW_BELOW else "shifted: as used"


def arms(described: Mapping[str, Any]) -> dict[str, str]:
    """Every arm with "yes" or the reason why not."""
    head = described["head"]
    reason = "yes" if head["status"] == "present" else head["why"]
    if reason == "yes" and head["norm_convention"].startswith("not recognised"):
        reason = f"norm convention {head['norm_convention']}"
    base = described["problem"] or "yes"
    drafts = base if base != "yes" else no_rollback(described) or "yes"
    reason = reason if drafts == "yes" else drafts
    return {"baseline": base, "depth0": base, "ngram1..8": drafts, "depth1..8": reason, "adaptive": reason}


def no_rollback(described: Mapping[str, Any]) -> str | None:
    """Why no draft can be rejected, if that is so."""
    return next((why for why in described["cache"]["rollback"].values() if why.startswith("no: ")), None)


def verify_modes(described: Mapping[str, Any]) -> dict[str, str]:
    """Each way of verifying: "yes" with what is to be known about it for this checkpoint, or why not."""
    refused, layers, differ = described["problem"] or no_rollback(described), described["cache"]["layers"], []
    if refused:
        return dict.fromkeys(("batched", "rowwise", "fixed", "serial"), refused)
    streams = described["model_type"] in families.VLM
    # Keys that grow with every row: an indexer's, and afm7's.
    growing = "IndexedCache" if streams else "ConcatenateKVCache" if described["model_type"] == "afm7" else None
    if layers.get("latent"):
        differ.append("MLA attention computes one row by another path than a block")
    if layers.get("sliding"):
        differ.append("past its window a sliding cache keeps another order for one row than for a block")
    return {
        "batched": "; ".join(["yes", *(f"not bit-equal to one-token decoding on any BLAS: {d}" for d in differ)]),
        "rowwise": NO_ROWWISE if streams else "yes, if its probe of the loaded model finds it exact",
        "fixed": NO_FIXED.format(growing) if growing else "yes, but not with --kv-bits",
        "serial": "yes",
    }
