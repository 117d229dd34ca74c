"""Where and how the tensors lie: prefixes, shards, files of their own, experts and norms in every published form, fp8,
and every quantization kind of the head beside every kind of the trunk."""

from __future__ import annotations

import json

import mlx.core as mx
import published
import pytest
import tiny
import torch
from exports import KINDS, convert
from safetensors.torch import load_file, save_file

from mtplab import cli
from mtplab.errors import ModelError, RequestError
from mtplab.models.inspect import inspect_checkpoint
from mtplab.models.loader import load_target

TOKENS = [3, 1, 4, 1, 5, 9]


def logits(folder, **options):
    """Trunk logits and head logits at depth 1 and 2, as one array."""
    one = load_target(folder, **options)
    out = one.target.forward(mx.array(TOKENS), one.target.new_cache())
    state, normed = one.head.rows(mx.array(TOKENS[1:]), out.hidden[:-1], None)
    _, second = one.head.rows(mx.array(TOKENS[2:]), state[:-1], None, depth=2)
    return mx.concatenate([out.logits, one.head.logits(normed), one.head.logits(second, 2)])


def same(a, b, tolerance=1e-5):
    assert mx.allclose(a, b, atol=tolerance), mx.abs(a - b).max().item()


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("head", ["", "language_model.", "model.", "model.language_model.", "language_model.model."])
def test_text_under_a_prefix_and_in_text_config(made, tmp_path, family, head):
    m = made(family)
    moved = {}
    for name, a in m.tensors.items():
        trunk = name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
        moved[head + name if name.startswith("mtp.") else trunk] = a
    moved["model.visual.blocks.0.norm.weight"] = torch.ones(4)
    changes = dict.fromkeys(m.config) | {"model_type": family, "text_config": m.config}
    same(logits(published.write(m, tmp_path / "x", moved, **changes)), logits(m.folder))


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe", "deepseek_v3", "nemotron_h"])
@pytest.mark.parametrize("layout", ["numbered", "fused", "fused with .weight", "stacked"])
def test_experts_of_the_head_in_every_layout(made, tmp_path, family, layout):
    m = made(family)
    in_head = [n for n in m.tensors if "experts." in n and "shared" not in n and is_head(family, n)]
    out = {n: a for n, a in m.tensors.items() if n not in in_head}
    for stem in {n.split("experts.")[0] for n in in_head}:
        out |= arrange(stem, {n: m.tensors[n] for n in in_head if n.startswith(stem)}, layout)
    assert set(out) != set(m.tensors) or layout == ("fused" if family == "qwen3_5_moe" else "numbered")
    same(logits(published.write(m, tmp_path / "x", out)), logits(m.folder))


def is_head(family, name):
    return (
        "model.layers.2." in name or "model.layers.3." in name if family == "deepseek_v3" else name.startswith("mtp.")
    )


def arrange(stem, tensors, layout):
    """Experts under `stem` (up to and with the dot) in another layout."""
    if f"{stem}experts.gate_up_proj" in tensors:
        tensors = {k: a for n, x in tensors.items() for k, a in published.numbered(n, x).items()}
    if layout == "numbered":
        return tensors
    count = 1 + max(int(n.split("experts.")[1].split(".")[0]) for n in tensors)
    kinds = {n.split(".")[-2] for n in tensors}
    parts = {p: torch.stack([tensors[f"{stem}experts.{e}.{p}.weight"] for e in range(count)]) for p in kinds}
    if layout == "stacked":
        names = {"up_proj": "fc1", "down_proj": "fc2"} if "gate_proj" not in parts else {}
        return {f"{stem}switch_mlp.{names.get(p, p)}.weight": a for p, a in parts.items()}
    ending = ".weight" if "weight" in layout else ""
    if "gate_proj" in parts:
        parts["gate_up_proj"] = torch.cat([parts.pop("gate_proj"), parts.pop("up_proj")], dim=1)
    return {f"{stem}experts.{p}{ending}": a for p, a in parts.items()}


def test_numbered_experts_in_a_qwen3_5_moe_trunk(made, tmp_path):
    m = made("qwen3_5_moe")
    out = {k: a for n, x in m.tensors.items() for k, a in published.numbered(n, x).items()}
    same(logits(published.write(m, tmp_path / "x", out)), logits(m.folder))


@pytest.mark.parametrize("family", ["mimo", "deepseek_v3", "qwen3_5"])
@pytest.mark.parametrize("file", ["mtp.safetensors", "model-mtp-head.safetensors", "shards"])
def test_shards_and_a_head_in_its_own_file(made, tmp_path, family, file):
    m = made(family)
    folder = published.write(m, tmp_path / "x")
    head = {n for n in m.tensors if "mtp" in n or is_head(family, n)}
    groups = {"model-00001-of-00002.safetensors": set(list(m.tensors)[::2]), file: head}
    if file == "shards":
        groups = {"model-00001-of-00002.safetensors": groups["model-00001-of-00002.safetensors"]}
        groups["model-00002-of-00002.safetensors"] = set(m.tensors) - groups["model-00001-of-00002.safetensors"]
    else:
        groups = {"model.safetensors": set(m.tensors) - head, file: head}
    (folder / "model.safetensors").unlink()
    for name, names in groups.items():
        save_file({n: m.tensors[n].contiguous() for n in names}, folder / name)
    index = {"weight_map": {n: f for f, names in groups.items() for n in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    same(logits(folder), logits(m.folder))
    assert inspect_checkpoint(folder)["files"] == 2


def test_blockwise_fp8_as_deepseek_is_published(made, tmp_path):
    """fp8 weights with a scale per 128 x 128 block, trunk and head, against the same weights rounded."""
    m = made("deepseek_v3")
    packed, rounded = {}, {}
    for name, a in m.tensors.items():
        if a.ndim != 2 or not name.endswith("_proj.weight"):
            packed[name] = rounded[name] = a
            continue
        rows, cols = a.shape
        scale = torch.full((-(-rows // 128), -(-cols // 128)), float(a.abs().max()) / 448)
        packed[name] = (a / scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]).to(
            torch.float8_e4m3fn
        )
        packed[f"{name}_scale_inv"] = scale
        rounded[name] = (packed[name].to(torch.bfloat16) * scale[0, 0].to(torch.float32)).to(torch.bfloat16).float()
    config = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
    a = logits(published.write(m, tmp_path / "fp8", packed, **config))
    same(a, logits(published.write(m, tmp_path / "rounded", rounded)), 0.05)
    spoiled = packed | {"model.layers.2.eh_proj.weight_scale_inv": torch.ones(3, 3)}
    with pytest.raises(ModelError, match=r"eh_proj\.weight_scale_inv has shape \[3, 3\]"):
        load_target(published.write(m, tmp_path / "bad", spoiled, **config))


@pytest.mark.parametrize("family", ["qwen3_next", "step3p5"])
def test_raw_and_shifted_norms(made, tmp_path, family):
    """A raw checkpoint, its export with shifted norms, and an export whose head was left raw are one model."""
    m = made(family)
    one = load_target(m.folder)
    shifted = convert(one, tmp_path / "shifted")
    left_raw = convert(one, tmp_path / "left")
    path = left_raw / "model.safetensors"
    weights = load_file(path)
    for name in weights:
        if (name.startswith("mtp.") or "model.layers.4" <= name < "model.layers.7") and "norm" in name:
            weights[name] = weights[name] - 1
    save_file(weights, path)
    same(logits(shifted), logits(m.folder))
    same(logits(left_raw), logits(m.folder))
    told = {f: inspect_checkpoint(f)["head"]["norm_convention"] for f in (m.folder, shifted, left_raw)}
    assert [t.split(":")[0] for t in told.values()] == ["raw", "shifted", "raw"]


@pytest.mark.parametrize("family", ["qwen3_next", "step3p5"])
def test_the_norm_convention_in_force_is_in_the_facts(made, tmp_path, family):
    """Recognised by the trunk's layout or by the means, or as asked for against both."""
    m = made(family)
    shifted = convert(load_target(m.folder), tmp_path / "shifted")
    assert load_target(m.folder).facts["head"]["norms"] == "raw"
    assert load_target(shifted).facts["head"]["norms"] == "shifted"
    for folder in (m.folder, shifted):
        for asked in ("raw", "shifted"):
            assert load_target(folder, head_norms=asked).facts["head"]["norms"] == asked


def test_a_norm_convention_for_a_head_that_has_but_one_is_refused(tmp_path, capfd):
    mimo, llama, qwen = (tiny.build(tmp_path / kind, kind) for kind in ("mimo", "llama", "qwen3_5"))
    assert load_target(mimo).facts["head"]["norms"] == "as used"
    common = ["-p", "abc", "-m", "2"]
    for asked in ("raw", "shifted"):
        for arm, why in (
            ("depth1", f"--head-norms {asked} cannot be honoured"),
            ("baseline", "nothing that is to run"),
        ):
            assert cli.main(["generate", "--model", str(mimo), *common, "--arm", arm, "--head-norms", asked]) == 2
            error = capfd.readouterr().err
            assert why in error and error.count("\n") == 1
    with pytest.raises(RequestError, match="needs an MTP head of a checkpoint"):
        load_target(llama, head_norms="raw")
    with pytest.raises(RequestError, match="nothing that is to run needs one"):
        load_target(qwen, head="none", head_norms="raw")


def test_tied_and_untied_unembeddings(tmp_path):
    for tied in (True, False):
        folder = tiny.build(tmp_path / str(tied), "mimo", tie_word_embeddings=tied)
        one = load_target(folder)
        assert hasattr(one.target.outer, "lm_head") is not tied
        assert (one.target.unembedding is one.target.embedding) is tied


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A MiMo model whose matrices take groups of 64."""
    return load_target(tiny.build(tmp_path_factory.mktemp("wide") / "m", "mimo", hidden_size=64, intermediate_size=128))


@pytest.mark.parametrize("head", KINDS)
@pytest.mark.parametrize("trunk", KINDS)
def test_every_kind_of_head_beside_every_kind_of_trunk(wide, tmp_path, trunk, head):
    """Both are compared with the dequantized weights of the same rounding: only the product's arithmetic is left."""
    packed = convert(wide, tmp_path / "p", KINDS[trunk], KINDS[head])
    plain = convert(wide, tmp_path / "u", KINDS[trunk], KINDS[head], unpack=True)
    one = load_target(packed)
    for part, kind in ((one.target.model.layers[0].mlp.up_proj, KINDS[trunk]), (one.head.layers[0].proj, KINDS[head])):
        assert getattr(part, "mode", None) == (kind or {}).get("mode")
        assert getattr(part, "bits", None) == (kind or {}).get("bits")
    same(logits(packed), logits(plain), 2e-4)
    told = inspect_checkpoint(packed)
    names = {"affine4": "affine 4-bit g64", "affine8": "affine 8-bit g32", "float": "F32"}
    assert told["head"]["roles"]["proj"]["kind"] == names.get(head, head)
    if trunk != "float" or head != "float":
        assert names.get(trunk, trunk) in told["quantization"]["parts"]["trunk"]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_affine_bits_and_groups(tmp_path, bits, group):
    wide = load_target(tiny.build(tmp_path / "m", "mimo", hidden_size=128, intermediate_size=128))
    kind = {"group_size": group, "bits": bits, "mode": "affine"}
    packed, plain = (convert(wide, tmp_path / n, kind, unpack=n == "u") for n in "pu")
    same(logits(packed), logits(plain), 5e-4)
    assert load_target(packed).head.layers[0].proj.bits == bits


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.", "language_model.model.", "model.language_model."])
def test_own_entries_under_every_prefix(wide, tmp_path, prefix):
    """The per-module entry is found wherever it stands: it is applied when right and named when wrong."""
    folder = convert(wide, tmp_path / "p", KINDS["affine4"], KINDS["affine8"], entries=prefix)
    assert load_target(folder).head.layers[0].proj.bits == 8
    path = folder / "config.json"
    config = json.loads(path.read_text())
    entry = next(k for k in config["quantization"] if k.endswith("mtp_layers.0.input_proj"))
    config["quantization"][entry]["group_size"] = 64
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"mtp_layers\.0\.input_proj is declared"):
        load_target(folder)


@pytest.mark.parametrize("key, value", [("bits", 8), ("bits", 2), ("group_size", 32)])
def test_a_global_kind_that_fits_no_tensor(wide, tmp_path, key, value):
    folder = convert(wide, tmp_path / "p", KINDS["affine4"], None)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization"] = {k: v for k, v in config["quantization"].items() if not isinstance(v, dict)}
    path.write_text(json.dumps(config))
    load_target(folder)
    path.write_text(json.dumps(config | {"quantization": config["quantization"] | {key: value}}))
    with pytest.raises(ModelError, match=rf"{key} = {value}"):
        load_target(folder)
    assert "fits no tensor" in inspect_checkpoint(folder)["problem"]
