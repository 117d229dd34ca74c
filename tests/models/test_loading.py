"""Checkpoints that are wrong: each is refused with the file, tensor or key named; nothing crashes or hangs."""

from __future__ import annotations

import json
import struct

import mlx.core as mx
import pytest
import tiny

from mtplab.errors import ModelError, RequestError
from mtplab.models import headers
from mtplab.models.inspect import inspect_checkpoint
from mtplab.models.loader import load_target


@pytest.fixture
def mimo(tmp_path):
    return tiny.build(tmp_path / "m", "mimo")


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def raw_safetensors(path, header, data=b"\0" * 64):
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(body)) + body + data)


def refused(folder, *parts, **options):
    with pytest.raises(ModelError) as caught:
        load_target(folder, **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    for part in parts:
        assert part in message, message
    return message


def test_without_config_or_weights_or_folder(tmp_path, mimo):
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no config.json")
    refused(tmp_path / "nowhere", "neither a checkpoint folder nor a hub id")
    (mimo / "model.safetensors").unlink()
    refused(mimo, "no .safetensors file")


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", '{"model_type": 3}', '{"model_type": "nonsense"}', "[" * 100_000])
def test_broken_config(mimo, text):
    (mimo / "config.json").write_text(text)
    refused(mimo)


def test_config_that_does_not_fit_the_weights(mimo):
    edit_config(mimo, hidden_size=64)
    refused(mimo, "does not fit its config.json")


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_truncated(mimo, keep):
    path = mimo / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(mimo, "model.safetensors")


ENTRY = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
LIES = {
    "header longer than the file": struct.pack("<Q", 10**9) + b"{}",
    "header of 2**63": struct.pack("<Q", 2**63) + b"{}",
    "not json": b"{not json",
    "not an object": b"[]",
    "entry without shape": {"a": {"dtype": "F32", "data_offsets": [0, 16]}},
    "unknown dtype": {"a": ENTRY | {"dtype": "F33"}},
    "negative shape": {"a": ENTRY | {"shape": [-4]}},
    "a float shape": {"a": ENTRY | {"shape": [4.0]}},
    "10**15 elements": {"a": ENTRY | {"shape": [10**15]}},
    "10**15 elements with matching offsets": {"a": {"dtype": "U8", "shape": [10**15], "data_offsets": [0, 10**15]}},
    "offsets past the end": {"a": ENTRY | {"data_offsets": [1000, 1016]}},
    "offsets reversed": {"a": ENTRY | {"data_offsets": [16, 0]}},
    "shared bytes": {"a": ENTRY, "b": ENTRY | {"data_offsets": [8, 24]}},
    "a name twice": b'{"a":%s,"a":%s}' % ((json.dumps(ENTRY).encode(),) * 2),
}


@pytest.mark.parametrize("lie", LIES)
def test_lying_headers(tmp_path, mimo, lie):
    value, path = LIES[lie], mimo / "model.safetensors"
    if isinstance(value, bytes) and value[:1] not in b"{[":
        path.write_bytes(value)
    else:
        raw_safetensors(path, value)
    refused(mimo, "model.safetensors")
    with pytest.raises(ModelError):
        inspect_checkpoint(mimo)


@pytest.mark.parametrize("name", ["../evil.safetensors", "/etc/passwd", "sub/x.safetensors", "absent.safetensors"])
def test_an_index_cannot_leave_its_folder_or_name_what_is_not_there(mimo, name):
    (mimo.parent / "evil.safetensors").write_bytes((mimo / "model.safetensors").read_bytes())
    (mimo / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    refused(mimo, "model.safetensors.index.json")


def test_one_tensor_in_two_files(mimo):
    (mimo / "model-2.safetensors").write_bytes((mimo / "model.safetensors").read_bytes())
    refused(mimo, "is in both")


def test_a_second_set_of_weights_beside_the_index_is_left_alone(mimo):
    """Some repositories ship `consolidated.safetensors` in another vendor's names; without an index it is theirs."""
    edit = {f"layers.0.attention.w{i}.weight": mx.ones((4, 4)) for i in range(3)}
    mx.save_safetensors(str(mimo / "consolidated.safetensors"), edit)
    names = list(mx.load(str(mimo / "model.safetensors")))
    index = mimo / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    assert set(headers.read_headers(mimo)) == set(names)
    assert load_target(mimo).head is not None
    told = inspect_checkpoint(mimo)
    assert told["files"] == 1 and told["tensors"] == len(names)
    index.unlink()
    refused(mimo, "layers.0.attention.w0.weight")


def test_a_pickle_is_never_opened(mimo):
    (mimo / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    load_target(mimo)
    (mimo / "model.safetensors").unlink()
    refused(mimo, "no .safetensors file")


def test_own_code_needs_permission(mimo):
    edit_config(mimo, model_file="evil.py")
    refused(mimo, "'evil.py'", "--trust-remote-code")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.mtp_layers.0.input_proj.weight"])
def test_weights_that_are_not_finite(mimo, name, value):
    def damage(weights):
        weights[name][0, 0] = value

    tiny.edit_weights(mimo, damage)
    refused(mimo, "not finite", name.split(".")[-2])


def test_missing_and_extra_trunk_tensors(mimo):
    tiny.edit_weights(mimo, lambda w: w.pop("model.layers.1.mlp.up_proj.weight"))
    refused(mimo, "model.layers.1.mlp.up_proj.weight")
    tiny.edit_weights(
        mimo, lambda w: w.update({"model.layers.1.mlp.up_proj.weight": mx.zeros((48, 32)), "model.x": mx.zeros(3)})
    )
    refused(mimo, "model.x")


def test_head_declared_but_absent(mimo):
    def strip(weights):
        for name in [n for n in weights if "mtp_layers" in n]:
            del weights[name]

    tiny.edit_weights(mimo, strip)
    refused(mimo, "declares 1 MTP layer", "model.mtp_layers.0.input_proj.weight", "need no head")
    assert load_target(mimo, head="none").head is None
    assert inspect_checkpoint(mimo)["head"]["status"] == "declared"


def test_head_present_but_declared_zero(mimo):
    edit_config(mimo, num_nextn_predict_layers=0)
    refused(mimo, "num_nextn_predict_layers = 0", "mtp_layers")


def test_head_tensor_missing_left_over_or_misshapen(mimo):
    name = "model.mtp_layers.0.hidden_layernorm.weight"
    tiny.edit_weights(mimo, lambda w: w.pop(name))
    refused(mimo, "lacks", name)
    tiny.edit_weights(mimo, lambda w: w.update({name: mx.ones(32), "model.mtp_layers.0.spare.weight": mx.ones(3)}))
    refused(mimo, "nobody uses", "model.mtp_layers.0.spare.weight")
    tiny.edit_weights(mimo, lambda w: w.pop("model.mtp_layers.0.spare.weight"))
    load_target(mimo)
    tiny.edit_weights(mimo, lambda w: w.update({name: mx.ones(31)}))
    refused(mimo, name, "[31]", "[32]")


def test_more_layers_than_declared_are_left_over(mimo):
    tiny.edit_weights(mimo, lambda w: w.update({"model.mtp_layers.1.input_proj.weight": mx.ones((32, 64))}))
    refused(mimo, "model.mtp_layers.1.input_proj.weight")


def test_a_head_is_demanded_where_there_is_none(checkpoints):
    refused(checkpoints("llama"), "no MTP head", head="require")


def test_unknown_options(mimo):
    for options, part in (
        ({"head": "maybe"}, "'maybe' is not one of auto, none, require"),
        ({"dtype": "float8"}, "'float8' is not one of"),
        ({"recursion": "up"}, "'up' is not one of final, block"),
        ({"hidden": "mid"}, "'mid' is not one of post, pre"),
        ({"head_norms": "odd"}, "'odd' is not one of raw, shifted"),
    ):
        with pytest.raises(RequestError) as caught:
            load_target(mimo, **options)
        assert part in str(caught.value)


QWEN_NORMS = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "mtp.norm", "pre_fc_norm")


def shift_head_norms(by):
    def change(weights):
        for n in weights:
            if "mtp." in n and any(k in n for k in QWEN_NORMS):
                weights[n] = weights[n] + by

    return change


def test_zero_centred_head_norms_are_recognised(tmp_path):
    """A head stored minus one next to a shifted trunk loads as the same head; where the means do not tell: refused."""
    a, b, c = (tiny.build(tmp_path / n, "qwen3_5") for n in "abc")
    tiny.edit_weights(b, shift_head_norms(-1.0))
    tiny.edit_weights(c, shift_head_norms(-0.45))
    shifted, raw = load_target(a).head, load_target(b).head
    for x, y in ((shifted, raw),):
        assert mx.allclose(x.layers[0].embed_norm.weight, y.layers[0].embed_norm.weight, atol=1e-6)
    refused(c, "cannot tell", "--head-norms raw")
    stored = mx.load(str(c / "model.safetensors"))["mtp.norm.weight"]
    assert mx.allclose(load_target(c, head_norms="shifted").head.layers[0].final_norm.weight, stored)
    assert mx.allclose(load_target(c, head_norms="raw").head.layers[0].final_norm.weight, stored + 1)


def test_a_raw_qwen_checkpoint_equals_its_converted_twin(tmp_path):
    """Raw layout (conv1d channels first, all norms zero-centred) and the converted one give the same logits."""
    a, b = tiny.build(tmp_path / "a", "qwen3_5"), tiny.build(tmp_path / "b", "qwen3_5")

    def to_raw(weights):
        for n in list(weights):
            if n.endswith("conv1d.weight"):
                weights[n] = mx.moveaxis(weights[n], 2, 1)
            elif any(k in n for k in (*QWEN_NORMS, "model.norm")) and weights[n].ndim == 1:
                weights[n] = weights[n] - 1.0

    tiny.edit_weights(b, to_raw)
    out = []
    for folder in (a, b):
        loaded = load_target(folder)
        o = loaded.target.forward(mx.array([3, 1, 4, 1, 5]), loaded.target.new_cache())
        _, normed = loaded.head.rows(mx.array([1, 4, 1, 5, 9]), o.hidden, None)
        out.append((o.logits, loaded.head.logits(normed)))
    assert mx.allclose(out[0][0], out[1][0], atol=1e-5)
    assert mx.allclose(out[0][1], out[1][1], atol=1e-4)


def test_qwen_under_a_prefix(tmp_path):
    """The published multimodal layout: trunk and head under their prefixes load as the plain one."""
    a, b = tiny.build(tmp_path / "a", "qwen3_5"), tiny.build(tmp_path / "b", "qwen3_5")

    def rename(weights):
        for n in list(weights):
            value = weights.pop(n)
            if n.startswith("mtp."):
                weights["language_model." + n] = value
            else:
                weights[n.replace("language_model.model.", "model.language_model.")] = value

    tiny.edit_weights(b, rename)
    x, y = load_target(a), load_target(b)
    assert mx.array_equal(x.head.layers[0].proj.weight, y.head.layers[0].proj.weight)


def quantized_copy(folder, source, modes):
    """Quantize the linears of a tiny MiMo checkpoint part by part. `modes`: {"trunk": kind, "head": kind}."""
    weights = {k: mx.array(v) for k, v in mx.load(str(source / "model.safetensors")).items()}
    table = {}
    for name in list(weights):
        part = "head" if "mtp_layers" in name else "trunk"
        if weights[name].ndim == 2 and name.endswith("proj.weight") and modes[part]:
            stem, kind = name.removesuffix(".weight"), modes[part]
            parts = mx.quantize(weights.pop(name), **kind)
            for suffix, a in zip(("weight", "scales", "biases"), parts, strict=False):
                weights[f"{stem}.{suffix}"] = a
            table[stem] = dict(kind)
    config = json.loads((source / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": 4, "mode": "affine"} | table
    tiny.write(folder, config, weights)
    return folder


KINDS = {
    "float": None,
    "affine4": {"group_size": 32, "bits": 4, "mode": "affine"},
    "affine8": {"group_size": 32, "bits": 8, "mode": "affine"},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}


@pytest.mark.parametrize(
    "trunk, head", [("float", "mxfp4"), ("affine4", "nvfp4"), ("mxfp4", "affine8"), ("mxfp8", "float")]
)
def test_head_and_trunk_of_different_kinds(tmp_path, trunk, head):
    """Never "Biases must be provided for affine quantization"; float parts close to the unquantized model."""
    source = tiny.build(tmp_path / "s", "mimo", hidden_size=64, intermediate_size=64)
    folder = quantized_copy(tmp_path / "q", source, {"trunk": KINDS[trunk], "head": KINDS[head]})
    loaded, plain = load_target(folder), load_target(source)
    layer = loaded.head.layers[0]
    if KINDS[head]:
        assert layer.proj.mode == KINDS[head]["mode"] and layer.proj.bits == KINDS[head]["bits"]
    tokens, hidden = mx.array([1, 4, 1]), plain.target.forward(mx.array([3, 1, 4]), plain.target.new_cache()).hidden
    got, wanted = (m.head.logits(m.head.rows(tokens, hidden, None)[1]) for m in (loaded, plain))
    # Only the head's own rounding is left here: the trunk's hidden states are the unquantized ones in both.
    spread = mx.std(wanted).item()
    assert mx.abs(got - wanted).mean().item() < (1e-5 if not KINDS[head] else 0.6) * spread
    assert mx.abs(got - mx.roll(wanted, 1, axis=-1)).mean().item() > 0.9 * spread, "the bound would catch a mix-up"


def test_config_and_tensors_disagree_about_the_bits(tmp_path):
    source = tiny.build(tmp_path / "s", "mimo", hidden_size=64, intermediate_size=64)
    folder = quantized_copy(tmp_path / "q", source, {"trunk": None, "head": KINDS["affine4"]})
    config = json.loads((folder / "config.json").read_text())
    stem = "model.mtp_layers.0.input_proj"
    config["quantization"][stem]["bits"] = 8
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, stem, "bits")


def test_headers_list_every_tensor(mimo):
    listed = headers.read_headers(mimo)
    stored = mx.load(str(mimo / "model.safetensors"))
    assert {n: tuple(a.shape) for n, a in stored.items()} == {n: t.shape for n, t in listed.items()}
    assert sum(t.nbytes for t in listed.values()) == sum(a.nbytes for a in stored.values())


def test_inspect_says_what_is_there(checkpoints):
    told = inspect_checkpoint(checkpoints("qwen3_5"))
    assert told["head"]["status"] == "present" and told["head"]["family"] == "qwen3_5"
    assert told["cache"]["layers"] == {"full": 1, "recurrent": 3}
    assert all(0.5 < m < 1.5 for m in told["head"]["norm_means"].values())
    assert told["arms"]["depth1..8"] == "yes"
    told = inspect_checkpoint(checkpoints("llama"))
    assert told["head"]["status"] == "none" and "llama" in told["arms"]["adaptive"]
    stored = mx.load(str(checkpoints("llama") / "model.safetensors"))
    assert told["parameters"] == sum(a.size for a in stored.values())
    json.dumps(told, allow_nan=False)
