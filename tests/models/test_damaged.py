"""Heads that are wrong, family by family, and 200 damaged checkpoints: refused in one sentence that names the tensor or
key, or loaded; never a crash, a hang, a traceback of something else or a blow-up of memory."""

from __future__ import annotations

import json
import random
import resource
import struct
import time
from pathlib import Path

import families
import mlx.core as mx
import published
import pytest
import tiny
import torch
from exports import KINDS, convert

from mtplab.errors import ModelError, MtplabError
from mtplab.models.inspect import inspect_checkpoint
from mtplab.models.loader import load_target

ALL = list(families.FAMILIES)
MAX_SECONDS, MAX_GROWTH = 5.0, 200 << 20


def refused(folder, *parts, **options):
    with pytest.raises(ModelError) as caught:
        load_target(folder, **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700
    assert all(p in message for p in parts), message


def parts(m):
    """(a projection's name, a block matrix's name, another of another shape) of the first head layer."""
    head = families.head_tensors(m, 0, m.layers[0])
    proj = next(n for n in head if n.endswith(("eh_proj.weight", "input_proj.weight", "mtp.fc.weight")))
    block = [n for n in head if ("_proj" in n or "experts" in n) and n != proj]
    first = next(n for n in block if "experts" not in n)
    other = next(n for n in block if head[n].shape != head[first].shape and "kv_b" not in n)
    return proj, first, other


@pytest.mark.parametrize("family", ALL)
def test_wrong_heads(made, tmp_path, family):
    m = made(family)
    proj, first, other = parts(m)
    names = sorted(n for n in m.tensors if n in families.head_tensors(m, 0, m.layers[0]))

    def changed(**tensors):
        return published.write(m, tmp_path / "x", {n: a for n, a in (m.tensors | tensors).items() if a is not None})

    refused(changed(**{proj: None}), proj)
    assert proj in inspect_checkpoint(tmp_path / "x")["head"]["why"]
    refused(changed(**{first: None}), first.rsplit(".", 2)[-2])
    assert inspect_checkpoint(tmp_path / "x")["head"]["status"] == "missing"
    extra = first.rsplit(".", 2)[0] + ".spare.weight"
    refused(changed(**{extra: torch.ones(3)}), extra, "nobody uses")
    refused(changed(**{proj: torch.ones(32, 63)}), proj, "[32, 63]", "[32, 64]")
    refused(changed(**{first: m.tensors[other], other: m.tensors[first]}), "has shape", "the head needs")
    refused(changed(**dict.fromkeys(n for n in m.tensors if n not in trunk_names(m))), "declares", proj)
    told = inspect_checkpoint(tmp_path / "x")
    assert told["head"]["status"] == "declared" and "declares a head" in told["arms"]["depth1..8"]
    assert load_target(tmp_path / "x", head="none").head is None
    key = "mtp_num_hidden_layers" if family.startswith("qwen") else "num_nextn_predict_layers"
    refused(published.write(m, tmp_path / "x", **{key: 0}), f"{key} = 0", "head tensor")
    assert inspect_checkpoint(tmp_path / "x")["head"]["status"] == "undeclared"
    more = ("layer_types has 7 entries",) if family == "step3p5" else ("lacks",)
    refused(published.write(m, tmp_path / "x", **{key: len(m.layers) + 1}), *more)
    refused(published.write(m, tmp_path / "x", **{key: "two"}), f"{key} = 'two'")
    assert names


def trunk_names(m):
    heads = {n for i, x in enumerate(m.layers) for n in families.head_tensors(m, i, x)}
    return set(m.tensors) - heads


def test_a_missing_expert_is_named(made, tmp_path):
    m = made("deepseek_v3")
    name = "model.layers.2.mlp.experts.1.up_proj.weight"
    refused(published.write(m, tmp_path / "x", {n: a for n, a in m.tensors.items() if n != name}), name)


@pytest.mark.parametrize("part", ["shared_head.head", "embed_tokens"])
def test_a_table_of_the_head_with_other_rows_than_the_trunks_is_named(made, tmp_path, part):
    """An id past the trunk's table would be read from the memory behind it."""
    m = made("deepseek_v3")
    name = f"model.layers.2.{part}"
    for rows in (tiny.VOCAB - 1, tiny.VOCAB + 3):
        folder = published.write(m, tmp_path / "x", m.tensors | {f"{name}.weight": torch.randn(rows, 32)})
        refused(folder, f"{name} has {rows} rows where the trunk's table has {tiny.VOCAB}")


def test_a_norm_convention_that_cannot_be_told(made, tmp_path):
    """An export (no raw layout left in the trunk) whose head norms lie between both conventions."""
    folder = convert(load_target(made("qwen3_next").folder), tmp_path / "x")
    weights = dict(mx.load(str(folder / "model.safetensors")))
    mx.eval(weights)
    between = {n: a - 0.45 if n.startswith("mtp.") and "norm" in n else a for n, a in weights.items()}
    tiny.write(folder, json.loads((folder / "config.json").read_text()), between)
    refused(folder, "cannot tell", "mtp.", "--head-norms raw or --head-norms shifted")
    assert "--head-norms" in inspect_checkpoint(folder)["arms"]["depth1..8"]


def test_packed_tensors_that_contradict_themselves(tmp_path):
    wide = load_target(tiny.build(tmp_path / "m", "mimo", hidden_size=64, intermediate_size=64))
    stem = "model.mtp_layers.0.input_proj"

    def spoiled(kind, **changes):
        folder = convert(wide, tmp_path / "x", None, KINDS[kind])
        weights = {n: mx.array(a) for n, a in mx.load(str(folder / "model.safetensors")).items()}
        mx.eval(weights)
        weights |= {f"{stem}.{k}": v for k, v in changes.items()}
        config = json.loads((folder / "config.json").read_text())
        tiny.write(folder, config, {n: a for n, a in weights.items() if a is not None})
        return folder

    refused(spoiled("affine4", biases=None), f"{stem}.biases")
    refused(spoiled("affine4", scales=None), f"{stem}.")
    refused(spoiled("mxfp4", biases=mx.zeros((64, 4))), f"{stem}.biases")
    refused(spoiled("affine4", scales=mx.zeros((64, 3))), stem)
    refused(spoiled("mxfp8", scales=mx.zeros((64, 7), dtype=mx.uint8)), stem)
    refused(spoiled("affine4", weight=mx.zeros((64, 16))), stem)


# 200 damaged checkpoints ----------------------------------------------------------------------------------------


def split(path: Path) -> tuple[dict, bytes]:
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def join(path: Path, header: dict | bytes, data: bytes, length: int | None = None) -> None:
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(body) if length is None else length) + body + data)


def flip_bytes(folder, rng):
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    for _ in range(rng.randint(1, 8)):
        raw[rng.randrange(end if rng.random() < 0.8 else len(raw))] = rng.randrange(256)
    path.write_bytes(raw)


def header_length(folder, rng):
    header, data = split(folder / "model.safetensors")
    length = rng.choice([0, 1, 7, 2**31, 2**63, 2**64 - 1, rng.randrange(10**6)])
    join(folder / "model.safetensors", header, data, length)


def cut(folder, rng):
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw[: rng.randrange(len(raw))])


def entry(folder, rng):
    """One tensor's entry says something else."""
    header, data = split(folder / "model.safetensors")
    name = rng.choice([n for n in header if n != "__metadata__"])
    begin, end = header[name]["data_offsets"]
    header[name] |= rng.choice(
        [
            {"data_offsets": [begin, end + 10**15]},
            {"data_offsets": [10**15, 10**15 + end - begin]},
            {"data_offsets": [end, begin]},
            {"data_offsets": ["0", "16"]},
            {"data_offsets": [begin]},
            {"data_offsets": [0, end - begin]},
            {"shape": [10**15]},
            {"shape": [10**8, 10**8], "data_offsets": [0, 4 * 10**16]},
            {"shape": [1] * 100_000},
            {"shape": [10**400]},
            {"shape": "32"},
            {"shape": [-1, 32]},
            {"shape": [32.5]},
            {"dtype": "F7"},
            {"dtype": ["F32"]},
            {"dtype": "I64"},
            {"dtype": "F16"},
            {"dtype": None},
        ]
    )
    join(folder / "model.safetensors", header, data)


def duplicate(folder, rng):
    header, data = split(folder / "model.safetensors")
    name = rng.choice([n for n in header if n != "__metadata__"])
    body = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"
    join(folder / "model.safetensors", body.encode(), data)


def rename(folder, rng):
    header, data = split(folder / "model.safetensors")
    names = [n for n in header if n != "__metadata__"]
    a, b = rng.sample(names, 2)
    header[a], header[b] = header[b], header[a]
    if rng.random() < 0.5:
        header[rng.choice(["", "\n", "../x", "model.layers.99999999999.x", "a" * 5000, "mtp."])] = header.pop(a)
    join(folder / "model.safetensors", header, data)


def index(folder, rng):
    name = rng.choice(["../other.safetensors", "/etc/passwd", "gone.safetensors", "", ".", 7, None, "a\0b", "sub/x"])
    value = rng.choice([{"weight_map": {"a": name}}, {"weight_map": [name]}, {}, [], "x", {"weight_map": None}])
    (folder / "model.safetensors.index.json").write_text(json.dumps(value))


def config(folder, rng):
    path = folder / "config.json"
    values = json.loads(path.read_text())
    key = rng.choice([*values, "text_config", "quantization", "layer_types", "rope_scaling", "model_file"])
    values[key] = rng.choice(
        [None, 0, -1, 1, 3, 10**15, 10**30, 1.5, 1e308, "x", "", [], [0] * 5, {}, {"bits": 4}, True, ["a", {}], "mimo"]
    )
    path.write_text(json.dumps(values))


DAMAGES = (flip_bytes, header_length, cut, entry, entry, duplicate, rename, index, config, config)


@pytest.mark.parametrize("family", ["mimo", "qwen3_5", "deepseek_v3", "nemotron_h"])
def test_two_hundred_damaged_checkpoints(made, tmp_path, family):
    """Fifty for each of four families, seeded; what is refused is refused in one sentence."""
    source, refusals = made(family).folder, 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    mx.reset_peak_memory()
    for seed in range(50):
        rng = random.Random(f"{family}{seed}")
        folder = tmp_path / str(seed)
        folder.mkdir()
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (folder / name).write_bytes((source / name).read_bytes())
        damage = DAMAGES[seed % len(DAMAGES)]
        damage(folder, rng)
        began = time.monotonic()
        for act in (load_target, inspect_checkpoint):
            try:
                act(folder)
            except MtplabError as error:
                refusals += act is load_target
                assert "\n" not in str(error) and len(str(error)) < 700, (seed, damage.__name__)
        assert time.monotonic() - began < MAX_SECONDS, (seed, damage.__name__)
    assert refusals >= 35
    assert mx.get_peak_memory() < 64 << 20
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MAX_GROWTH


@pytest.mark.parametrize("key, value", [("num_hidden_layers", 10**9), ("hidden_size", 10**12), ("vocab_size", 1e300)])
def test_a_config_that_claims_what_no_file_holds(made, tmp_path, key, value):
    """Refused before a module is built: a billion layers would take hours to make."""
    refused(published.write(made("mimo"), tmp_path / "x", **{key: value}), f"config.json has {key} = ")
