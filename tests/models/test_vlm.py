"""Qwen3.8-Flash-Next over mlx-vlm's modules: trunk and head equal transformers' and mlx-vlm's own, every cache rolls
back, the loop equals the baseline; and what is said where mlx-vlm is missing."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import flash_next
import helpers
import mlx.core as mx
import numpy as np
import published
import pytest
import tiny
import torch
from exports import convert
from mlx.utils import tree_flatten

from mtplab.cli import main
from mtplab.decode import verify
from mtplab.decode.drafters.mtp import MTPDrafter
from mtplab.decode.drafters.simple import ScriptedDrafter
from mtplab.decode.selection import Draws
from mtplab.decode.settings import Settings
from mtplab.diagnose import state
from mtplab.diagnose.shadow import Shadow
from mtplab.errors import ModelError, RequestError
from mtplab.models import mlxlm, vlm
from mtplab.models.inspect import inspect_checkpoint
from mtplab.models.loader import load_target
from mtplab.train.write import new_head

needs_vlm = pytest.mark.skipif(
    mlxlm.no_trunk("qwen4_exp") is not None, reason="needs mlx-vlm's qwen4_exp: pip install --no-deps 'mlx-vlm>=0.7.10'"
)
BUDGETS = [512, 8]  # attention over everything, and over two chosen blocks of four keys
TEXT = tiny.prompt(5, 40)
TEXT[7] = flash_next.EOS  # n-grams do not reach over the end of a text


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("flash-next")
    return {b: flash_next.build(root / str(b), b) for b in BUDGETS}


@pytest.fixture(scope="module")
def loaded(made):
    return {b: load_target(m.folder) for b, m in made.items()}


def close(a, b, tolerance):
    np.testing.assert_allclose(np.array(a), b.detach().numpy(), atol=tolerance, rtol=tolerance)


# The same numbers ----------------------------------------------------------------------------------------------


@needs_vlm
@pytest.mark.parametrize("budget", BUDGETS)
def test_trunk_logits_are_transformers(made, loaded, budget):
    main_model, target = made[budget].main, loaded[budget].target
    wide = []
    hook = main_model.model.hyper_connection_mixer.register_forward_pre_hook(lambda _m, args: wide.append(args[0]))
    with torch.no_grad():
        wanted = main_model(torch.tensor([TEXT]), use_cache=False).logits[0]
    hook.remove()
    out = target.forward(mx.array(TEXT), target.new_cache())
    close(out.logits, wanted, 1e-4)
    close(out.hidden, wide[0][0], 1e-4)
    assert out.hidden.shape == (40, flash_next.STREAMS * flash_next.DIM) and float(wanted.std()) > 2
    cache = target.new_cache()
    parts = [target.forward(mx.array(TEXT[a:b]), cache).logits for a, b in ((0, 5), (5, 6), (6, 33), (33, 40))]
    close(mx.concatenate(parts), wanted, 1e-4)


@needs_vlm
def test_the_two_budgets_are_two_models(loaded):
    """Otherwise nothing here would see which keys are chosen."""
    outs = [loaded[b].target.forward(mx.array(TEXT), loaded[b].target.new_cache()).logits for b in BUDGETS]
    assert mx.array_equal(outs[0][:8], outs[1][:8]) and mx.abs(outs[0][-1] - outs[1][-1]).max() > 0.1


@needs_vlm
@pytest.mark.parametrize("budget", BUDGETS)
def test_trunk_logits_are_mlx_vlms_own(loaded, budget):
    """Its outer call with its own caches: a prompt, and single rows, which it computes by another path."""
    target = loaded[budget].target
    tokens = dict.fromkeys(("image_token_id", "video_token_id", "vision_start_token_id"), -1)
    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2), **tokens)
    own = vlm.part("language").LanguageModel(target.outer.args, config)
    own.load_weights(tree_flatten(target.outer.parameters()))
    theirs, ours = own.make_cache(), target.new_cache()
    for a, b in ((0, 20), *((t, t + 1) for t in range(20, 40))):
        wanted = own(mx.array([TEXT[a:b]]), cache=theirs).logits[0]
        got = target.forward(mx.array(TEXT[a:b]), ours).logits
        assert mx.allclose(got, wanted, atol=1e-4, rtol=1e-4), (a, b)


@needs_vlm
@pytest.mark.parametrize("budget", BUDGETS)
def test_head_is_the_torch_reference_at_depth_1_to_3(made, loaded, budget):
    m, head, target = made[budget], loaded[budget].head, loaded[budget].target
    hidden = torch.tensor(np.array(target.forward(mx.array(TEXT), target.new_cache()).hidden))[:-1]
    wanted = hidden
    for depth in (1, 2, 3):
        following, logits = m.mtp(m.main, TEXT[depth:], wanted)
        got, normed = head.rows(mx.array(TEXT[depth:]), mx.array(wanted.numpy()), None, depth=depth)
        close(head.logits(normed, depth), logits, 1e-4)
        close(got, following, 1e-4)
        wanted = following[:-1]
    logits = m.mtp(m.main, TEXT[1:], hidden)[1]
    for cuts in ((0, 4, 5, 8, 39), (0, 30, *range(31, 40))):
        cache, ours = head.new_cache(), mx.array(hidden.numpy())
        rows = [head.rows(mx.array(TEXT[1 + a : 1 + b]), ours[a:b], cache)[1] for a, b in itertools.pairwise(cuts)]
        close(head.logits(mx.concatenate(rows)), logits, 1e-4)


@needs_vlm
def test_converted_and_quantized_exports(loaded, tmp_path):
    one = loaded[8]
    plain = load_target(convert(one, tmp_path / "plain"))
    kind = {"group_size": 32, "bits": 4, "mode": "affine"}
    packed, unpacked = (load_target(convert(one, tmp_path / n, kind, unpack=n == "u")) for n in "pu")
    assert packed.facts["quantized"]
    for a, b, tolerance in ((plain, one, 1e-6), (packed, unpacked, 1e-3)):
        out, ref = (x.target.forward(mx.array(TEXT[:8]), x.target.new_cache()) for x in (a, b))
        assert mx.allclose(out.logits, ref.logits, atol=tolerance)
        heads = [x.head.logits(x.head.rows(mx.array(TEXT[1:8]), ref.hidden[:-1], None)[1]) for x in (a, b)]
        assert mx.allclose(*heads, atol=tolerance)


# The transaction and the loop ------------------------------------------------------------------------------------


@needs_vlm
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("before", [1, 7, 30])
@pytest.mark.parametrize("rows", [1, 2, 6])
def test_keep_n_equals_feeding_n(loaded, budget, before, rows):
    """Every part of the state: keys, values, the indexer's keys and positions, both convolutions, delta, table ids."""
    target, text = loaded[budget].target, TEXT[: before + rows]
    serial = helpers.SerialStates(target, text)
    for n in range(rows + 1):
        cache = target.new_cache()
        target.forward(mx.array(text[:before]), cache)  # as a block: no longer than what goes row by row
        with cache.attempt(rows) as attempt:
            mx.eval(target.forward(mx.array(text[before:]), cache).logits)
            attempt.keep(n)
        serial.check(cache)
        if n == rows // 2:  # and it goes on from there as the serial one does, with what the indexer pools anew
            again = helpers.serial_cache(target, text[: before + n])
            ours, theirs = (target.forward(mx.array([7, 9, 2]), c).logits for c in (cache, again))
            assert mx.array_equal(ours, theirs)


@needs_vlm
def test_the_state_holds_every_history(loaded):
    """The table's ids and both convolutions are there to be compared, and say what was fed."""
    target = loaded[8].target
    leaves = [layer.cache for layer in helpers.serial_cache(target, TEXT[:12]).layers if hasattr(layer, "cache")]
    table = leaves[1]
    assert [len(c) for c in leaves] == [2, 4, 2] and table[3].tolist() == [TEXT[10:12]]
    assert table[2].shape == (1, 9, flash_next.STREAMS * flash_next.DIM) and table[0].shape[1] == 3


@needs_vlm
@pytest.mark.parametrize("rows", [1, 3])
def test_an_exception_inside_leaves_the_state_as_it_was(loaded, rows):
    target = loaded[8].target
    cache = helpers.serial_cache(target, TEXT[:20])
    with pytest.raises(KeyError), cache.attempt(rows):
        mx.eval(target.forward(mx.array(TEXT[20 : 20 + rows]), cache).logits)
        raise KeyError("boom")
    helpers.assert_same_state(cache, helpers.serial_cache(target, TEXT[:20]))


@needs_vlm
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_every_acceptance_pattern_gives_the_baseline(loaded, budget, k):
    one, settings, prompt = loaded[budget], Settings(max_tokens=9), TEXT[:9]
    future = helpers.tokens_of(helpers.run_baseline(one.target, prompt, Settings(max_tokens=14)))
    expected, serial = future[:9], helpers.SerialStates(one.target, prompt + future)
    for pattern in itertools.product(range(k + 1), repeat=2):
        drafter, cache = ScriptedDrafter(future, list(pattern), tiny.VOCAB), one.target.new_cache()
        records = []
        for record in helpers.run_speculative(one.target, prompt, settings, drafter, k, cache=cache):
            records.append(record)
            if len(records) > 1:
                # The chunks of the prompt sum in another order than its tokens one by one, and no more than that.
                assert held_like(cache, serial, 1e-4)
        assert helpers.tokens_of(records) == expected, pattern
        assert [r.accepted for r in records[1:3]] == list(pattern), "the script was played"
    for history in ("verified", "drafted", "none"):
        drafter = MTPDrafter(one.head, settings, Draws(0, 0), history=history)
        assert helpers.tokens_of(helpers.run_speculative(one.target, prompt, settings, drafter, k)) == expected


def held_like(cache, serial, tolerance):
    leaves = zip(cache.layers, serial.states[cache.length - 1], strict=True)
    pairs = [pair for leaf, wanted in leaves for pair in zip(helpers.contents(leaf), wanted, strict=True)]
    return all(a.shape == b.shape and np.allclose(a, b, atol=tolerance) for a, b in pairs)


@needs_vlm
def test_a_serial_verify_rolls_back_and_the_other_ways_are_refused(loaded):
    target = loaded[8].target
    way = verify.Serial(target)
    cache = way.new_cache(40)
    target.forward(mx.array(TEXT[:1]), cache)
    for t in range(1, 12):
        target.forward(mx.array(TEXT[t : t + 1]), cache)
    with cache.attempt(4) as attempt:
        mx.eval(way.forward(mx.array(TEXT[12:16]), cache).logits)
        attempt.keep(2)
    helpers.assert_same_state(cache, helpers.serial_cache(target, TEXT[:14]))
    with pytest.raises(RequestError, match=r"fixed has no form for IndexedCache; use --verify serial"):
        verify.Fixed(target, 4)
    told = inspect_checkpoint(loaded[8].folder)["verify"]
    assert told["serial"] == told["batched"] == "yes"
    assert "IndexedCache" in told["fixed"] and told["rowwise"].startswith("no: ")
    rowwise = verify.Rowwise(target, verify.units(target))
    try:
        with pytest.raises(ModelError, match="use --verify serial"), cache.attempt(3):
            rowwise.forward(mx.array([1, 2, 3]), cache)
    finally:
        rowwise.close()
    helpers.assert_same_state(cache, helpers.serial_cache(target, TEXT[:14]))


@needs_vlm
def test_the_diagnosis_keeps_the_indexer_in_step(loaded):
    """A shadow's chain of blocks, a state copied at an earlier length, and a comparison that sees the index."""
    target = loaded[8].target
    shadow = Shadow(target, TEXT[:17], Settings())
    for at, keep in ((17, 2), (19, 4), (23, 1)):
        shadow.feed(TEXT[at : at + 4], keep)
    cache = target.new_cache()
    target.forward(mx.array(TEXT[:16]), cache)
    for t in range(16, 24):
        target.forward(mx.array(TEXT[t : t + 1]), cache)
    then = state.snapshot(cache)
    assert state.compare(state.leaves(shadow.cache), then, 24) == []
    target.forward(mx.array(TEXT[24:25]), cache)
    copy = state.copied(target, [(i, leaf) for i, leaf in then], 24)
    plain = next(leaf for leaf in copy.layers if hasattr(leaf, "index_keys"))
    assert plain.index_keys.shape[1] == plain.index_position_ids.shape[-1] == 24
    plain.index_keys = plain.index_keys + 1.0
    assert {d.part for d in state.compare(state.leaves(copy), state.leaves(shadow.cache), 24)} == {"index keys"}


@needs_vlm
def test_a_head_to_be_trained_gets_the_states_it_is_later_given(made):
    """Its own family takes them after the mixer, whatever the published head of this trunk takes."""
    bare = load_target(made[8].folder, head="none")
    head, _ = new_head(bare)
    out = bare.target.forward(mx.array(TEXT[:6]), bare.target.new_cache())
    assert bare.target.hidden == head.spec.hidden == "post"
    assert head.logits(head.rows(mx.array(TEXT[1:6]), out.hidden[:-1], None)[1]).shape == (5, tiny.VOCAB)


@needs_vlm
def test_cache_options_that_cannot_be_honoured_are_refused(made):
    for option in ({"kv_bits": 8}, {"max_kv_size": 64}):
        with pytest.raises(RequestError, match="cannot be honoured"):
            load_target(made[8].folder, **option)


# Checkpoints that do not fit -------------------------------------------------------------------------------------


@needs_vlm
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ({"ple_storage": {"manifest": "/etc/passwd"}}, "outside the checkpoint"),
        ({"ngram_vocab_size_base": 10**15}, r"at least 2 x 2 x 1000000000000000 rows, the files hold 240"),
        ({"heads_per_ngram": 10**9}, "the files hold 240"),
        ({"hidden_size": 64}, "does not fit its config.json"),
    ],
)
def test_a_config_that_does_not_fit_is_one_sentence(made, tmp_path, text, said):
    m = made[8]
    folder = published.write(m, tmp_path / "odd", text_config=m.config["text_config"] | text)
    with pytest.raises(ModelError, match=said):
        load_target(folder, head="none")


@needs_vlm
@pytest.mark.parametrize(
    "name", ["model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_2.weight", "mtp.fc_hidden.weight"]
)
def test_a_missing_tensor_is_named(made, tmp_path, name):
    m = made[8]
    folder = published.write(m, tmp_path / "less", {n: a for n, a in m.tensors.items() if n != name})
    with pytest.raises(ModelError, match=name.split(".")[-2].replace("shard_2", "hold 180|shards.2")):
        load_target(folder)


# Without the extra -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("installed", [None, "old"])
def test_without_the_extra_one_sentence_says_what_to_install(made, tmp_path, monkeypatch, capsys, installed):
    find = importlib.util.find_spec
    old = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(
        mlxlm.importlib.util, "find_spec", lambda n, *a: (old if installed else None) if n == "mlx_vlm" else find(n, *a)
    )
    monkeypatch.setattr(mlxlm.importlib.metadata, "version", lambda name: {"mlx-lm": "0.32.2"}.get(name, "0.5.1"))
    here = "mlx-vlm 0.5.1 is installed and has none" if installed else "mlx-vlm is not installed"
    sentence = (
        "model_type 'qwen4_exp' is Qwen3.8-Flash-Next, for which mlx-lm 0.32.2 has no trunk but mlx-vlm 0.7.10 has: "
        f"run `pip install 'mtplab[vlm]'` ({here})"
    )
    folder = made[8].folder
    with pytest.raises(ModelError) as error:
        load_target(folder)
    assert str(error.value) == sentence
    assert main(["generate", "--model", str(folder), "--prompt", "a"]) == 3
    told = capsys.readouterr().err
    assert sentence in " ".join(told.split()) and "Traceback" not in told


def test_inspect_needs_no_provider(made, monkeypatch):
    monkeypatch.setattr(mlxlm, "no_trunk", lambda kind: "no trunk")
    told = inspect_checkpoint(made[8].folder)
    assert told["problem"] == told["arms"]["baseline"] == told["arms"]["depth1..8"] == "no trunk"
    assert told["head"]["status"] == "present" and told["head"]["missing"] == []
    assert told["cache"]["layers"] == {"recurrent": 3, "full": 1}
    assert told["bytes"]["n-gram table"] == 240 * 8 * 4 and told["bytes"]["vision"] == 12


def test_inspect_sees_a_head_without_its_mixer(made, tmp_path):
    m = made[8]
    kept = {n: a for n, a in m.tensors.items() if "mtp.hyper_connection_mixer" not in n and n != "mtp.fc_hidden.weight"}
    told = inspect_checkpoint(published.write(m, tmp_path / "less", kept))
    assert told["head"]["status"] == "missing"
    assert {"mtp.hyper_connection_mixer.weight", "mtp.fc_hidden.weight"} <= set(told["head"]["missing"])


@needs_vlm
def test_the_providers_start_up_is_not_run():
    """Its image processors bring transformers, and torch with them: half a minute of every fresh process."""
    code = (
        "import json, sys; from mtplab.models import vlm; vlm.part('language'); vlm.part('config'); vlm.part('fp8'); "
        "print(json.dumps([m for m in ('torch', 'transformers', 'cv2', 'fastapi') if m in sys.modules]))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert json.loads(out.stdout) == [], out.stderr
