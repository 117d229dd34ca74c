"""What `inspect` says of a checkpoint, against what a load of the same folder does."""

from __future__ import annotations

import json
from collections import Counter

import mlx.core as mx
import pytest
import tiny

from mtplab import cli
from mtplab.errors import ModelError
from mtplab.models import footprint, headfile
from mtplab.models.cache import kind
from mtplab.models.inspect import inspect_checkpoint
from mtplab.models.loader import load_target
from mtplab.models.mlxlm import cache_module
from mtplab.models.static import static_layers
from mtplab.train import write
from mtplab.trials.arms import open_verifier, parse_arm

MODES = ["batched", "rowwise", "fixed", "serial"]


@pytest.fixture
def merged(tmp_path):
    """A llama trunk with a head of its own folder inside."""
    trunk = tiny.build(tmp_path / "llama", "llama")
    tiny.write_head(trunk, trunk / headfile.INSIDE)
    return trunk


def edit_config(folder, *without, **changes):
    path = folder / "config.json"
    config = {k: v for k, v in json.loads(path.read_text()).items() if k not in without} | changes
    path.write_text(json.dumps(config))


# A head in a folder of its own ---------------------------------------------------------------------------------------


def test_a_head_folder_inside_is_shown_as_it_is_loaded(merged, capfd):
    told, loaded = inspect_checkpoint(merged), load_target(merged, head="require")
    head, stored = told["head"], mx.load(str(merged / headfile.INSIDE / "model.safetensors"))
    assert (head["status"], head["family"], head["folder"]) == ("present", "mimo", headfile.INSIDE)
    assert head["files"] == ["model.safetensors"] and head["tensors"] == len(stored)
    assert head["bytes"] == told["bytes"]["mtp head"] == sum(a.nbytes for a in stored.values())
    assert head["layers"] == len(loaded.head.layers) and head["spec"]["fusion"] == loaded.facts["head"]["fusion"]
    assert told["arms"]["depth1..8"] == told["arms"]["adaptive"] == "yes"
    own = sum(a.nbytes for a in mx.load(str(merged / "model.safetensors")).values())
    assert told["bytes"]["total"] == own + head["bytes"] and list(told["bytes"])[-1] == "total"
    # One more layer of keys and values, 16 bits a number, shaped as the head's own config says.
    per_token = 2 * 2 * sum(c["num_key_value_heads"] * 8 for c in [tiny.LLAMA] * 3 + [head_config(merged)])
    assert told["memory"]["4096"] == told["bytes"]["total"] + 4096 * per_token
    assert cli.main(["inspect", str(merged)]) == 0
    shown = capfd.readouterr().out
    assert f"mtp_head/model.safetensors ({len(stored)} tensors, {head['bytes'] / 1024:.1f} KiB)" in shown


def head_config(trunk):
    return json.loads((trunk / headfile.INSIDE / "config.json").read_text())


def test_the_heads_own_shape_counts_where_the_trunk_has_another(merged):
    before = inspect_checkpoint(merged)["memory"]["4096"]
    edit_config(merged / headfile.INSIDE, num_key_value_heads=4)
    assert inspect_checkpoint(merged)["memory"]["4096"] == before + 4096 * 2 * 2 * 2 * 8


SPOILED = {
    "another trunk": (lambda f: edit_config(f.parent, num_hidden_layers=2), "refused", "was made for a trunk with"),
    "another family": (lambda f: edit_config(f, model_type="llama"), "refused", "no family with an MTP head"),
    "a strange tensor": (lambda f: tiny.edit_weights(f, lambda w: w.update(x=mx.ones(1))), "refused", "no head tensor"),
    "a lacking projection": (
        lambda f: tiny.edit_weights(f, lambda w: w.pop("model.mtp_layers.0.mlp.up_proj.weight")),
        "missing", "mlp.up_proj",
    ),
    "a lacking norm": (
        lambda f: tiny.edit_weights(f, lambda w: w.pop("model.mtp_layers.0.final_layernorm.weight")),
        "missing", "final_layernorm",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", SPOILED)
def test_a_head_folder_that_a_load_refuses_is_not_called_present(merged, how):
    spoil, status, said = SPOILED[how]
    spoil(merged / headfile.INSIDE)
    told = inspect_checkpoint(merged)
    assert told["head"]["status"] == status and said in told["head"]["why"]
    assert told["arms"]["baseline"] == "yes" and told["arms"]["depth1..8"] == told["head"]["why"]
    if how != "another trunk":  # there the trunk is wrong, too
        with pytest.raises(ModelError):
            load_target(merged, head="require")


def test_two_heads_are_refused_as_on_loading(tmp_path):
    trunk = tiny.build(tmp_path / "mimo", "mimo")
    assert inspect_checkpoint(trunk)["head"]["files"] == ["model.safetensors"]
    head, config = write.new_head(load_target(trunk, head="none"))
    write.write_head(trunk / headfile.INSIDE, head, config, "")
    told = inspect_checkpoint(trunk)
    assert told["head"]["status"] == "refused" and "name one with --head" in told["arms"]["adaptive"]


# Ways of verifying ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3_text"])
def test_every_way_of_verifying_is_listed_and_opens(checkpoints, family):
    told, loaded = inspect_checkpoint(checkpoints(family))["verify"], load_target(checkpoints(family), head="none")
    assert list(told) == MODES
    for mode in MODES:
        assert told[mode].startswith("yes")
        assert open_verifier(loaded, parse_arm("ngram2"), mode).mode == mode
    assert ("sliding" in told["batched"]) is (family == "gemma3_text")


def test_a_trunk_that_cannot_be_loaded_can_be_verified_in_no_way(checkpoints, tmp_path):
    weights = dict(mx.load(str(checkpoints("llama") / "model.safetensors")))
    tiny.write(tmp_path / "x", tiny.LLAMA | {"model_type": "deepseek_v4"}, weights)
    told = inspect_checkpoint(tmp_path / "x")
    assert list(told["verify"]) == MODES and set(told["verify"].values()) == {told["problem"]}


@pytest.mark.parametrize("family", [*footprint.NO_ROLLBACK, "afm7"])
def test_families_with_caches_of_their_own_kind(checkpoints, tmp_path, family):
    """llama4 and deepseek_v41 cannot take a draft back; afm7's cache has no fixed form."""
    weights = dict(mx.load(str(checkpoints("llama") / "model.safetensors")))
    tiny.write(tmp_path / "x", tiny.LLAMA | {"model_type": family}, weights)
    told = inspect_checkpoint(tmp_path / "x")
    assert told["arms"]["baseline"] == told["arms"]["depth0"] == "yes"
    if family == "afm7":
        assert told["verify"]["fixed"].startswith("no: ") and told["verify"]["rowwise"].startswith("yes")
        assert told["arms"]["ngram1..8"] == "yes"
    else:
        no = f"no: {footprint.NO_ROLLBACK[family]} cannot be rolled back"
        told_no = [*told["verify"].values(), *told["cache"]["rollback"].values(), told["arms"]["ngram1..8"]]
        assert all(said.startswith(no) for said in told_no)


def test_those_kinds_are_refused_by_the_caches_themselves(load):
    lm = cache_module()
    assert kind(lm.ChunkedKVCache(8)) == "unknown" and kind(lm.ConcatenateKVCache()) == "plain"

    class Target:
        def new_cache(self):
            return type("Cache", (), {"layers": [lm.ConcatenateKVCache()]})

    with pytest.raises(Exception, match="no form for ConcatenateKVCache"):
        static_layers(Target(), 8)


# Configs of other kinds ----------------------------------------------------------------------------------------------


def test_a_gpt2_checkpoint_is_read_by_its_own_names(tmp_path):
    config = {"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 16, "n_positions": 1024, "vocab_size": 97}
    weights = {"wte.weight": mx.ones((97, 16)), "wpe.weight": mx.ones((1024, 16)), "ln_f.weight": mx.ones(16)}
    weights |= {f"h.{i}.attn.c_attn.weight": mx.ones((16, 48)) for i in range(2)}
    tiny.write(tmp_path / "g", config, weights)
    told = inspect_checkpoint(tmp_path / "g")
    assert told["cache"]["layers"] == {"full": 2} and told["context"] == 1024
    assert told["bytes"]["embedding"] == 97 * 16 * 4
    assert told["memory"] == {"1024": None}, "its keys for heads are not read, and no number is better than a wrong one"
    assert told["head"]["status"] == "none" and told["arms"]["ngram1..8"] == "yes"
    assert cli.main(["inspect", str(tmp_path / "g")]) == 0


@pytest.mark.parametrize("layers", [5, 7, 12])
def test_gemma3_slides_five_layers_of_six_where_its_config_does_not_say(tmp_path, layers):
    folder = tiny.build(tmp_path / "g", "gemma3_text", num_hidden_layers=layers)
    edit_config(folder, "sliding_window_pattern")
    kinds = Counter(k for layer in load_target(folder).target.cache_kinds for k in layer)
    told = inspect_checkpoint(folder)["cache"]["layers"]
    assert (told.get("sliding", 0), told.get("full", 0)) == (kinds["window"], kinds["plain"])
    assert told["sliding"] == layers - layers // 6
