"""A head in a folder of its own: beside the trunk or inside its folder, read strictly, for its own trunk alone."""

from __future__ import annotations

import json
import shutil

import helpers
import mlx.core as mx
import pytest
import tiny

from mtplab import cli
from mtplab.decode.drafters.mtp import MTPDrafter
from mtplab.decode.selection import Draws
from mtplab.decode.settings import Settings
from mtplab.errors import ModelError, RequestError
from mtplab.models import headfile
from mtplab.models.loader import load_target
from mtplab.train import write


@pytest.fixture
def pair(tmp_path):
    """A llama trunk, a random head for it, and the MiMo checkpoint that has the same head built in."""
    trunk = tiny.build(tmp_path / "llama", "llama")
    tiny.write_head(trunk, tmp_path / "head", card="# A card\n")
    return trunk, tmp_path / "head"


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_it_is_the_head_that_was_written(pair, tmp_path):
    """Values, wiring and facts; MiMo's names in the file."""
    trunk, folder = pair
    loaded = load_target(trunk, head_folder=folder)
    stored = mx.load(str(folder / "model.safetensors"))
    assert all(n.startswith("model.mtp_layers.0.") and a.dtype == mx.float16 for n, a in stored.items())
    assert len(stored) == 16
    proj = stored["model.mtp_layers.0.input_proj.weight"].astype(mx.float32)
    assert mx.array_equal(loaded.head.layers[0].proj.weight, proj)
    assert loaded.facts["head"]["family"] == "mimo" and loaded.facts["head_folder"] == str(folder)
    assert load_target(trunk).facts["head_folder"] is None
    # The trunk exists once: the head's embedding is the trunk's.
    assert loaded.head._target.embedding is loaded.target.embedding


def test_inside_the_checkpoint_it_is_found_and_other_programs_see_the_trunk_alone(pair):
    from mlx_lm.utils import load_model

    trunk, folder = pair
    wanted = load_target(trunk, head_folder=folder)
    shutil.copytree(folder, trunk / headfile.INSIDE)
    merged = load_target(trunk, head="require")
    tokens, hidden = mx.array([1, 2, 3]), mx.ones((3, 32))
    got, want = (m.head.logits(m.head.rows(tokens, hidden, None)[1]) for m in (merged, wanted))
    assert mx.array_equal(got, want)
    assert load_target(trunk, head="none").head is None
    theirs = load_model(trunk)[0](tokens[None])[0]
    assert mx.array_equal(merged.target.forward(tokens, merged.target.new_cache()).logits, theirs)


@pytest.mark.parametrize("k", [1, 3])
def test_greedy_equals_the_baseline(pair, k):
    loaded = load_target(pair[0], head_folder=pair[1])
    settings, prompt = Settings(max_tokens=40, ignore_eos=True), tiny.prompt(1, 12)
    drafter = MTPDrafter(loaded.head, settings, Draws(0, 0))
    got = helpers.tokens_of(helpers.run_speculative(loaded.target, prompt, settings, drafter, k))
    assert got == helpers.tokens_of(helpers.run_baseline(loaded.target, prompt, settings))


NAME = "model.mtp_layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.pop(NAME), NAME),
        (lambda w: w.update({"model.mtp_layers.0.spare.weight": mx.ones(3)}), "model.mtp_layers.0.spare.weight"),
        (lambda w: w.update({"model.norm.weight": mx.ones(32)}), "model.norm.weight, which is no head tensor"),
        (lambda w: w.update({NAME: mx.ones((32, 48))}), NAME),
        (lambda w: w.update({NAME: mx.full((48, 32), float("nan"))}), "not finite"),
    ],
)
def test_a_head_that_is_wrong_is_refused_by_name(pair, change, said):
    tiny.edit_weights(pair[1], change)
    with pytest.raises(ModelError, match=said):
        load_target(pair[0], head_folder=pair[1])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers = 0"),
        ({"num_nextn_predict_layers": 2}, "lacks model.mtp_layers.1"),
        ({"model_type": "llama"}, "holds a 'llama', which is no family"),
        ({"intermediate_size": 64}, "has shape"),
        ({"hidden_size": None}, "hidden_size = None; it must be"),
        ({"num_attention_heads": 5}, "5 heads cannot share a width of 32"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(pair, changes, said):
    edit_config(pair[1], **changes)
    with pytest.raises(ModelError, match=said):
        load_target(pair[0], head_folder=pair[1])


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 2}, {"vocab_size": 96}])
def test_a_head_of_another_trunk_is_refused_with_both(pair, tmp_path, changes):
    other = tiny.build(tmp_path / "other", "llama", **changes)
    ((name, value),) = changes.items()
    with pytest.raises(ModelError, match=rf"made for a trunk with {name} {tiny.LLAMA[name]}, and this one has {value}"):
        load_target(other, head_folder=pair[1])


def test_folders_that_are_no_head(pair, tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json, so it is no head folder"):
        load_target(pair[0], head_folder=tmp_path / "nowhere")
    with pytest.raises(ModelError, match="no family with an MTP head"):
        load_target(pair[0], head_folder=pair[0])


def test_two_heads_need_a_choice(pair, tmp_path):
    trunk = tiny.build(tmp_path / "mimo", "mimo")
    tiny.write_head(trunk, trunk / headfile.INSIDE, seed=9)
    with pytest.raises(ModelError, match="holds two heads"):
        load_target(trunk)
    chosen = load_target(trunk, head_folder=trunk / headfile.INSIDE)
    assert chosen.facts["head_folder"] == str(trunk / headfile.INSIDE)


def test_the_command_line_takes_it_or_says_why_not(pair, capfd, tmp_path):
    trunk, folder = map(str, pair)
    common = ["generate", "--model", trunk, "-p", "abc", "-m", "8", "--ignore-eos", "-o", "json"]
    assert cli.main([*common, "--head", folder, "--arm", "depth2"]) == 0
    told = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert told["settings"]["head"]["family"] == "mimo"
    assert cli.main([*common, "--head", folder, "--arm", "baseline"]) == 2
    assert "nothing that is to run needs one" in capfd.readouterr().err
    sweep = [
        "sweep",
        "--model",
        trunk,
        "--corpus",
        "c",
        "--rounds",
        "1",
        "--prompts",
        "2",
        "--max-tokens",
        "6",
        "--quiet",
    ]
    sweep += ["--prompt-tokens", "8", "--modes", "greedy", "--head", folder, "-o", "json"]
    assert cli.main([*sweep, "--arms", "baseline", "--out", str(tmp_path / "a")]) == 2
    assert "no arm needs the head in" in capfd.readouterr().err
    assert cli.main([*sweep, "--arms", "baseline,depth1", "--out", str(tmp_path / "b")]) == 0
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    assert {"head/config.json", "head/model.safetensors"} <= set(manifest["files"])
    assert manifest["effective"]["depth1"]["head"]["family"] == "mimo"


def test_what_is_asked_of_the_head_does_not_stop_the_baseline_beside_it(pair, tmp_path):
    """A llama has no family of heads, so that the options would be refused for an arm without the given one."""
    sweep = ["sweep", "--model", str(pair[0]), "--corpus", "c", "--rounds", "1", "--prompts", "1", "--max-tokens", "4"]
    sweep += ["--quiet", "--prompt-tokens", "8", "--modes", "greedy", "--arms", "baseline,depth1", "-o", "json"]
    sweep += ["--head", str(pair[1]), "--recursion", "block", "--out", str(tmp_path / "run")]
    assert cli.main(sweep) == 0
    effective = json.loads((tmp_path / "run" / "manifest.json").read_text())["effective"]
    assert effective["depth1"]["head"]["recursion"] == "block"
    assert effective["depth1"]["head"]["norms"] == "as used"


def test_a_head_takes_the_shape_of_its_trunk():
    base = {"model_type": "x", "vocab_size": 5}
    shape = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
    config = write.head_config(base | shape)
    assert {k: config[k] for k in shape} == shape
    # Heads wider than the trunk's width allows, experts without a width of their own, text below text_config.
    config = write.head_config(base | {"text_config": {"hidden_size": 2048, "num_attention_heads": 24}})
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["intermediate_size"]) == (32, 32, 8192)
    with pytest.raises(ModelError, match="no hidden_size"):
        write.head_config(base)
    with pytest.raises(ModelError, match="width 33 is odd"):
        write.head_config(base | {"hidden_size": 33})


def test_options_exclude_each_other(pair):
    with pytest.raises(RequestError, match="nothing that is to run needs one"):
        load_target(pair[0], head="none", head_folder=pair[1])
