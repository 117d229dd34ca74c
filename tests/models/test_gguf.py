"""GGUF: read as MLX's own reader reads it, converted to the model it was, refused with the reason where it is wrong."""

from __future__ import annotations

import json
import random
import struct

import gguf_builder as builder
import mlx.core as mx
import numpy as np
import pytest
import tiny

from mtplab import cli
from mtplab.errors import ModelError, RequestError
from mtplab.models import convert, gguf, headers, inspect
from mtplab.models.loader import load_target

CONFIG = tiny.LLAMA | {"hidden_size": 64, "intermediate_size": 96}
QUANTIZED = ("Q4_0", "Q4_1", "Q8_0")
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A tiny llama checkpoint whose rows are whole blocks, and its weights."""
    folder = tiny.build(tmp_path_factory.mktemp("gguf") / "llama", "llama", **CONFIG)
    return folder, {n: np.array(a) for n, a in mx.load(str(folder / "model.safetensors")).items()}


def logits(folder, **options):
    target = load_target(folder, head="none", **options).target
    return target.forward(mx.array(TOKENS), target.new_cache()).logits


def file_of(tmp_path, source, kind="F32", **meta):
    return builder.llama(tmp_path / f"{kind}.gguf", CONFIG, source[1], kind, **meta)


# What is converted ---------------------------------------------------------------------------------------------------


def test_a_float_file_becomes_the_model_it_was(tmp_path, source):
    made = convert.convert(file_of(tmp_path, source), tmp_path / "out", dtype="float32")
    assert mx.array_equal(logits(tmp_path / "out"), logits(source[0]))
    assert made["parameters"] == sum(a.size for a in source[1].values())
    config = headers.read_json(tmp_path / "out" / "config.json")
    assert {k: config[k] for k in CONFIG if k in config} == {k: v for k, v in CONFIG.items() if k in config}


@pytest.mark.parametrize("kind", [*QUANTIZED, "F16"])
def test_every_kind_is_read_as_mlx_reads_it(tmp_path, source, kind):
    """mx.load's reader is another program (gguflib)."""
    path = file_of(tmp_path, source, kind)
    theirs, (_, ours) = mx.load(str(path)), gguf.read(path)
    for name, tensor in ours.items():
        wanted = theirs[name]
        stem = name.removesuffix(".weight")
        if f"{stem}.scales" in theirs:
            scales, biases = (theirs[f"{stem}.{p}"].astype(mx.float32) for p in ("scales", "biases"))
            bits = wanted.shape[-1] // scales.shape[-1]
            wanted = mx.dequantize(wanted, scales, biases, group_size=32, bits=bits)
        assert np.abs(np.array(wanted.astype(mx.float32)) - tensor.floats()).max() < 1e-6, name


@pytest.mark.parametrize(("kind", "within"), [("BF16", 2**-7), ("Q8_0", 0.012), ("Q4_1", 0.2), ("Q4_0", 0.2)])
def test_decoded_weights_are_close_to_the_ones_encoded(tmp_path, source, kind, within):
    _, tensors = gguf.read(file_of(tmp_path, source, kind))
    wanted = source[1]["model.layers.1.mlp.down_proj.weight"]
    got = tensors["blk.1.ffn_down.weight"].floats()
    assert 0 < np.abs(got - wanted).max() <= within * np.abs(wanted).max()


@pytest.mark.parametrize("kind", QUANTIZED)
def test_stored_blocks_stay_quantized_and_mean_the_same(tmp_path, source, kind):
    path = file_of(tmp_path, source, kind)
    convert.convert(path, tmp_path / "float", dtype="float32")
    convert.convert(path, tmp_path / "stored", dtype="stored")
    assert mx.abs(logits(tmp_path / "float") - logits(tmp_path / "stored")).max().item() < 2e-4
    told = inspect.inspect_checkpoint(tmp_path / "stored")
    assert told["quantization"]["packed"] == 2 + 7 * CONFIG["num_hidden_layers"]
    assert told["bytes"]["total"] < (0.3 if kind == "Q8_0" else 0.2) * sum(a.nbytes for a in source[1].values())


def test_float16_is_float32_rounded_once(tmp_path, source):
    path = file_of(tmp_path, source, "Q4_1")
    convert.convert(path, tmp_path / "a", dtype="float32")
    convert.convert(path, tmp_path / "b")
    a, b = (mx.load(str(tmp_path / n / "model.safetensors")) for n in "ab")
    assert all(mx.array_equal(a[n].astype(mx.float16), b[n]) for n in a)


def test_transformers_reads_the_same_model(tmp_path, source):
    """Within 2e-3 in float32. Needs the package `gguf`, which transformers reads such files with."""
    pytest.importorskip("gguf", reason="transformers reads GGUF through the package gguf")
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    path = file_of(tmp_path, source, "Q4_1")
    convert.convert(path, tmp_path / "out", dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path), gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        theirs = model(torch.tensor([TOKENS])).logits[0].numpy()
    assert np.abs(np.array(logits(tmp_path / "out")) - theirs).max() < 2e-3


def test_a_tied_file_becomes_a_tied_model(tmp_path, source):
    weights = {n: a for n, a in source[1].items() if n != "lm_head.weight"}
    path = builder.llama(tmp_path / "t.gguf", CONFIG, weights)
    convert.convert(path, tmp_path / "out")
    assert headers.read_json(tmp_path / "out" / "config.json")["tie_word_embeddings"] is True
    target = load_target(tmp_path / "out").target
    out = target.forward(mx.array(TOKENS), target.new_cache())
    assert mx.allclose(out.logits, out.hidden @ target.embedding.weight.T, atol=1e-4)


# The tokenizer -------------------------------------------------------------------------------------------------------


def test_the_tokenizer_merges_splits_digits_and_knows_its_special_token(tmp_path, source):
    convert.convert(file_of(tmp_path, source), tmp_path / "out")
    tokenizer = load_target(tmp_path / "out").tokenizer
    assert tokenizer.encode("abc") == [66] and tokenizer.encode("ab") == [65]
    assert tokenizer.encode("12") == [ord("1") - 33, ord("2") - 33]
    assert tokenizer.encode("ABC <end>")[-2:] == [64, 67]
    assert tokenizer.decode(tokenizer.encode("ABC 12 #")) == "ABC 12 #"
    assert tokenizer.eos_ids == {67}
    assert tokenizer.chat([{"role": "user", "content": "abc"}]) == [66]


def test_a_beginning_is_added_where_the_file_says_so(tmp_path, source):
    convert.convert(file_of(tmp_path, source, **{"tokenizer.ggml.add_bos_token": True}), tmp_path / "out")
    assert load_target(tmp_path / "out").tokenizer.encode("abc") == [67, 66]


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        ({"tokenizer.ggml.model": "llama"}, "of the kind 'llama'"),
        ({"tokenizer.ggml.pre": "deepseek-v9"}, "splits text like 'deepseek-v9'"),
        ({"tokenizer.ggml.eos_token_id": 5000}, "not whole"),
    ],
)
def test_an_unknown_tokenizer_is_refused_and_can_be_replaced(tmp_path, source, meta, said):
    path = file_of(tmp_path, source, **meta)
    with pytest.raises(ModelError, match=said) as caught:
        convert.convert(path, tmp_path / "out")
    assert "--tokenizer" in str(caught.value) and not (tmp_path / "out").exists()
    convert.convert(path, tmp_path / "out", tokenizer=source[0])
    assert load_target(tmp_path / "out").tokenizer.encode("#$") == [2, 3]


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        ({"general.architecture": "qwen2"}, "holds a 'qwen2'"),
        ({"llama.rope.scaling.type": "yarn"}, "scales its rotary embedding .*scaling.type is 'yarn'"),
        ({"llama.expert_count": 8}, "8 experts"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count is 4"),
        ({"general.alignment": 0}, "alignment 0"),
    ],
)
def test_what_a_llama_cannot_express(tmp_path, source, meta, said):
    with pytest.raises(ModelError, match=said):
        convert.convert(file_of(tmp_path, source, **meta), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tensors_that_are_strange_missing_or_doubled(tmp_path, source):
    weights = source[1]
    meta = builder.metadata(CONFIG)
    embed = {"token_embd.weight": (weights["model.embed_tokens.weight"], "F32")}
    cases = [
        (
            {"blk.0.ssm_a.weight": (np.ones((2, 32), np.float32), "F32")} | embed,
            "'blk.0.ssm_a.weight' that a llama has",
        ),
        ({}, "lacks the tensor 'token_embd.weight'"),
        (
            {"token_embd.weight": (np.ones((97, 33), np.float32), "F16"), "rope_freqs.weight": (np.ones(4), "F32")},
            "rotary",
        ),
    ]
    for i, (tensors, said) in enumerate(cases):
        with pytest.raises(ModelError, match=said):
            convert.convert(builder.write(tmp_path / f"{i}.gguf", meta, tensors), tmp_path / "out")
    with pytest.raises(ModelError, match=r"lacks the metadata 'llama\.block_count'"):
        less = {k: v for k, v in meta.items() if k != "llama.block_count"}
        convert.convert(builder.write(tmp_path / "m.gguf", less, embed), tmp_path / "out")


def test_another_quantization_is_named(tmp_path, source):
    raw = bytearray(file_of(tmp_path, source).read_bytes())
    at = raw.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    raw[at : at + 4] = struct.pack("<I", 12)
    (tmp_path / "k.gguf").write_bytes(raw)
    with pytest.raises(ModelError, match=r"'output_norm.weight' is of type 12, which is none of F32, F16, Q4_0"):
        gguf.read(tmp_path / "k.gguf")


LIES = {
    "empty": lambda raw: b"",
    "another magic": lambda raw: b"GGML" + raw[4:],
    "version 1": lambda raw: raw[:4] + struct.pack("<I", 1) + raw[8:],
    "10**15 tensors": lambda raw: raw[:8] + struct.pack("<Q", 10**15) + raw[16:],
    "10**15 pairs": lambda raw: raw[:16] + struct.pack("<Q", 10**15) + raw[24:],
    "a key of 2**63 bytes": lambda raw: raw[:24] + struct.pack("<Q", 2**63) + raw[32:],
    "no data": lambda raw: raw[: len(raw) // 2],
}


@pytest.mark.parametrize("lie", LIES)
def test_lying_files(tmp_path, source, lie):
    raw = LIES[lie](file_of(tmp_path, source).read_bytes())
    (tmp_path / "x.gguf").write_bytes(raw)
    with pytest.raises(ModelError) as caught:
        convert.convert(tmp_path / "x.gguf", tmp_path / "out")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_mutated_files_are_read_or_refused(tmp_path, source):
    """300 damaged heads: a ModelError or a model, never anything else, and quickly."""
    raw = file_of(tmp_path, source).read_bytes()
    head, rng, refused = raw.index(b"tokenizer.ggml.model"), random.Random(5), 0
    for _ in range(300):
        damaged = bytearray(raw[: rng.choice((len(raw), rng.randrange(len(raw))))])
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(min(head, len(damaged)))] = rng.randrange(256)
        (tmp_path / "x.gguf").write_bytes(damaged)
        try:
            meta, tensors = gguf.read(tmp_path / "x.gguf")
            convert.weights(tensors, convert.config_of(meta, tensors), "float32")
        except ModelError:
            refused += 1
    assert 200 < refused <= 300


LAYER = "blk.2."
NEEDED = ["token_embd.weight", "output_norm.weight", *(f"{LAYER}{n}.weight" for n in convert.LAYER_NAMES)]


def stored(path):
    """(metadata, tensors as the builder takes them) of a file of floats."""
    _, tensors = gguf.read(path)
    return builder.metadata(CONFIG), {n: (t.floats(), "F32") for n, t in tensors.items()}


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_tensor_is_named_and_nothing_is_written(tmp_path, source, name, capfd):
    meta, tensors = stored(file_of(tmp_path, source))
    path = builder.write(tmp_path / "m.gguf", meta, {n: t for n, t in tensors.items() if n != name})
    assert cli.main(["convert", str(path), str(tmp_path / "out")]) == 3
    error = capfd.readouterr().err
    assert f"lacks the tensor '{name}'" in error and error.count("\n") == 1
    assert {p.name for p in tmp_path.iterdir()} == {"F32.gguf", "m.gguf"}


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("blk.3.attn_q.weight", (64, 64), "'blk.3.attn_q.weight', which the model of its metadata has no place for"),
        ("blk.1.attn_k.bias", (32,), "'blk.1.attn_k.bias', which the model of its metadata has no place for"),
        ("blk.0.attn_q.bias", (64,), "lacks the tensor 'blk.0.attn_k.bias'"),
        ("blk.1.attn_v.weight", (64, 64), r"'blk.1.attn_v.weight' has shape \[64, 64\], the model needs \[32, 64\]"),
        ("output.weight", (96, 64), r"'output.weight' has shape \[96, 64\], the model needs \[97, 64\]"),
    ],
)
def test_tensors_that_do_not_fit_the_metadata(tmp_path, source, name, shape, said):
    meta, tensors = stored(file_of(tmp_path, source))
    path = builder.write(tmp_path / "m.gguf", meta, tensors | {name: (np.ones(shape, np.float32), "F32")})
    with pytest.raises(ModelError, match=said):
        convert.convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_biases_of_every_projection_are_kept(tmp_path, source):
    meta, tensors = stored(file_of(tmp_path, source))
    sizes = {"attn_q": 64, "attn_k": 32, "attn_v": 32, "attn_output": 64}
    biases = {f"blk.{i}.{n}.bias": (np.ones(s, np.float32), "F32") for i in range(3) for n, s in sizes.items()}
    convert.convert(builder.write(tmp_path / "m.gguf", meta, tensors | biases), tmp_path / "out")
    assert load_target(tmp_path / "out").target.model.layers[2].self_attn.o_proj.bias.shape == (64,)


@pytest.mark.parametrize(
    ("merge", "said"),
    [
        ("abc", "has the merge 'abc', which is not two tokens"),
        ("a b c", "has the merge 'a b c', which is not two tokens"),
        ("zz a", "has the merge 'zz a', but no token 'zz'"),
        ("a zz", "has the merge 'a zz', but no token 'zz'"),
        ("b a", "has the merge 'b a', but no token 'ba'"),
    ],
)
def test_a_bad_merge_is_named(tmp_path, source, capfd, merge, said):
    path = file_of(tmp_path, source, **{"tokenizer.ggml.merges": ["a b", merge, "ab c"]})
    assert cli.main(["convert", str(path), str(tmp_path / "out")]) == 3
    error = capfd.readouterr().err
    assert said in error and "--tokenizer" in error and error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["F32.gguf"]
    assert cli.main(["convert", str(path), str(tmp_path / "out"), "--tokenizer", str(source[0])]) == 0


TYPES = ["x", [], [1], None, -1, 10**15, 1e308, True, {"a": [1]}, ["a", 1], [["a"]]]


def test_metadata_of_every_wrong_type(tmp_path, source, monkeypatch):
    """Refused in one sentence, as a rule with the key, or converted to what loads and encodes."""
    meta, tensors = gguf.read(file_of(tmp_path, source))
    named, refused = 0, 0
    for key in [*meta, "llama.attention.key_length", "llama.rope.scaling.type", "tokenizer.ggml.add_bos_token",
                "tokenizer.ggml.eot_token_id"]:  # fmt: skip
        for i, value in enumerate(TYPES):
            monkeypatch.setattr(convert.gguf, "read", lambda path, k=key, v=value: (meta | {k: v}, tensors))
            out = tmp_path / f"{key}{i}"
            try:
                convert.convert(tmp_path / "x.gguf", out)
            except ModelError as error:
                assert "\n" not in str(error) and len(str(error)) < 300 and not out.exists(), (key, value)
                named, refused = named + (key in str(error)), refused + 1
            else:
                load_target(out).tokenizer.encode("abc")
    assert refused > 180 and named >= refused - 12


# The verb ------------------------------------------------------------------------------------------------------------


def test_the_verb(tmp_path, source, capfd):
    path, out = str(file_of(tmp_path, source, "Q8_0")), str(tmp_path / "out")
    assert cli.main(["convert", path, out, "--dtype", "stored", "-o", "json"]) == 0
    told = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert told["kinds"] == ["F32", "Q8_0"] and told["folder"] == out
    assert load_target(out).facts["quantized"] is True
    assert cli.main(["convert", path, out]) == 2
    assert "exists already; choose another folder" in capfd.readouterr().err
    assert cli.main(["convert", path, out + "2", "--dtype", "int3"]) == 2
    assert "'int3' is not one of float32, float16, stored" in capfd.readouterr().err
    assert cli.main(["convert", str(tmp_path / "none.gguf"), out + "2"]) == 3
    assert "none.gguf cannot be read: No such file" in capfd.readouterr().err


def test_nothing_half_made_stays(tmp_path, source, monkeypatch):
    monkeypatch.setattr(convert.os, "rename", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(RequestError, match="No space left"):
        convert.convert(file_of(tmp_path, source), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["F32.gguf"]
