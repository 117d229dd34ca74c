"""Configs whose values are of another type: one sentence with file and key, or a model that runs; never a fault."""

from __future__ import annotations

import copy
import json

import mlx.core as mx
import pytest
import tiny

from mtplab import cli
from mtplab.errors import ModelError
from mtplab.models.inspect import inspect_checkpoint
from mtplab.models.loader import load_target
from mtplab.models.tokenizer import eos_ids
from mtplab.train import write

VALUES = ["x", [], [1], None, -1, 10**15, 1e308, True, {"a": [1]}]
SHARED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "rms_norm_eps", "rope_theta")


def changed(config, path, value):
    config = copy.deepcopy(config)
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return config


def paths(config, before=()):
    for key, value in config.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from paths(value, (*before, key))


def runs(loaded):
    """A pass of the trunk and one of the head, where a wrong value that loads would be met."""
    out = loaded.target.forward(mx.array([1, 2, 3]), loaded.target.new_cache())
    _, normed = loaded.head.rows(mx.array([2, 3]), out.hidden[:-1], loaded.head.new_cache())
    mx.eval(out.logits, loaded.head.logits(normed))


@pytest.fixture
def pair(tmp_path):
    trunk = tiny.build(tmp_path / "llama", "llama")
    tiny.write_head(trunk, tmp_path / "head")
    return trunk, tmp_path / "head"


def every_change(folder, extra, act):
    """`act` on the folder under every change of every key; returns how many were refused."""
    path, refused = folder / "config.json", 0
    config = json.loads(path.read_text())
    for key in [*paths(config), *((e,) for e in extra)]:
        for value in VALUES:
            path.write_text(json.dumps(changed(config, key, value)))
            try:
                act()
            except ModelError as error:
                refused += 1
                assert "\n" not in str(error) and len(str(error)) < 500, (key, value)
                if key[-1] in SHARED and key[-2:-1] != ("trunk",):
                    assert "config.json has" in str(error) and key[-1] in str(error), (key, value, str(error))
    path.write_text(json.dumps(config))
    return refused


EXTRA = ("text_config", "rope_parameters", "rope_scaling", "quantization", "eos_token_id", "sliding_window")


def test_every_key_of_a_checkpoint(tmp_path):
    folder = tiny.build(tmp_path / "mimo", "mimo")
    assert every_change(folder, EXTRA, lambda: runs(load_target(folder))) > 100


def test_every_key_of_a_hybrid(tmp_path):
    folder = tiny.build(tmp_path / "qwen", "qwen3_5")
    assert every_change(folder, EXTRA, lambda: runs(load_target(folder))) > 150


def test_every_key_of_a_head_folder(pair):
    trunk, head = pair
    assert every_change(head, ("text_config", "rope_scaling"), lambda: runs(load_target(trunk, head_folder=head))) > 80


def test_every_key_of_a_trunk_that_gets_a_head(tmp_path):
    folder = tiny.build(tmp_path / "llama", "llama")
    assert every_change(folder, EXTRA, lambda: write.new_head(load_target(folder))) > 80


@pytest.mark.parametrize(
    ("which", "key", "value", "said"),
    [
        ("trunk", "text_config", "x", "config.json has text_config = 'x'; it must be an object"),
        ("trunk", "rope_theta", None, "config.json has rope_theta = None; it must be a number above 0"),
        ("trunk", "max_position_embeddings", -1, "has max_position_embeddings = -1; it must be a whole number"),
        ("trunk", "hidden_size", "32", "config.json has hidden_size = '32'; it must be a whole number of at least 1"),
        ("head", "mtplab_head", "x", "head/config.json has mtplab_head = 'x'; it must be an object"),
        ("head", "mtplab_head", {"trunk": [1]}, "config.json has mtplab_head.trunk = [1]; it must be an object"),
        ("head", "rope_theta", "x", "head/config.json has rope_theta = 'x'; it must be a number above 0"),
        ("head", "num_attention_heads", True, "head/config.json has num_attention_heads = True; it must be a whole"),
    ],
)
def test_the_command_line_ends_with_3_and_names_file_and_key(pair, capfd, which, key, value, said):
    path = pair[which == "head"] / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    asked = ["generate", "--model", str(pair[0]), "--head", str(pair[1]), "--depth", "1", "-p", "abc", "-m", "2"]
    assert cli.main(asked) == 3
    error = capfd.readouterr().err
    assert said in error and error.count("\n") == 1
    if which == "trunk":
        assert said in inspect_checkpoint(pair[0])["problem"]
        with pytest.raises(ModelError, match=f"trunk's config.json has {key}"):
            write.head_config(json.loads(path.read_text()))


def test_what_some_families_list_by_layer_is_not_refused(checkpoints):
    """gemma3n's MLP widths, step3p5's bases: a new head takes a width of its own then."""
    config = json.loads((checkpoints("llama") / "config.json").read_text())
    config |= {"model_type": "gemma3n", "intermediate_size": [48, 64, 48], "rope_theta": [1e4, 1e6, 1e4]}
    made = write.head_config(config)
    assert made["intermediate_size"] == 4 * made["hidden_size"] and made["rope_theta"] == 10000.0


# The end of a text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "generation", "wanted"),
    [
        ({"eos_token_id": 7}, None, {7}),
        ({"eos_token_id": [7, 9]}, None, {7, 9}),
        ({"eos_token_id": None}, None, set()),
        ({}, None, set()),
        ({"eos_token_id": 7}, {"eos_token_id": [8, 9]}, {8, 9}),
        ({"eos_token_id": 7}, {"eos_token_id": None}, {7}),
        ({"eos_token_id": None, "text_config": {"eos_token_id": 5}}, {"temperature": 1}, {5}),
    ],
)
def test_the_ids_that_end_a_text(tmp_path, config, generation, wanted):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert eos_ids(tmp_path, config) == wanted


@pytest.mark.parametrize("value", ["7", [7, "9"], 7.0, True, {"id": 7}, [[7]], [None]])
def test_an_end_that_is_no_id_is_refused_with_it(tmp_path, value):
    for config, file in (({"eos_token_id": value}, None), ({"eos_token_id": 7}, {"eos_token_id": value})):
        if file is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(file))
        with pytest.raises(ModelError, match=r"eos_token_id .*; it must be a token id or a list of them"):
            eos_ids(tmp_path, config)
