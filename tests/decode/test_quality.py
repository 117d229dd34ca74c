"""`match` and `overlap` at every position, against a head whose quality is known and against the drafter itself."""

from __future__ import annotations

import helpers
import pytest
import tiny
from test_heads import permutation_model

from mtplab.decode.drafters.mtp import MTPDrafter
from mtplab.decode.quality import Agreement, agreement
from mtplab.decode.selection import Draws
from mtplab.decode.settings import Settings
from mtplab.models.loader import load_target


def test_an_exact_predictor_matches_everywhere_at_every_depth(tmp_path):
    loaded = load_target(permutation_model(tmp_path / "m", "hidden"))
    text = helpers.tokens_of(helpers.run_baseline(loaded.target, [3], Settings(max_tokens=40)))
    got = agreement(loaded.target, loaded.head, [3, *text], depth=3)
    assert got.match == [1.0, 1.0, 1.0] and got.positions == [40, 39, 38]
    assert all(o > 0.99 for o in got.overlap)


@pytest.mark.parametrize("kind, build", [("mimo", {}), ("mimo", {"head_layers": 2}), ("qwen3_5", {})])
def test_depth_one_is_what_the_drafter_proposes(load, kind, build):
    loaded, text = load(kind, build=build), tiny.prompt(5, 30)
    target, settings = loaded.target, Settings()
    import mlx.core as mx

    out, hits = target.forward(mx.array(text), target.new_cache()), 0
    drafter = MTPDrafter(loaded.head, settings, Draws(0, 0))
    drafter.prime(mx.array(text[1:11]), out.hidden[:10])
    for t in range(10, 29):
        drafter.observe([text[t + 1]], out.hidden[t : t + 1], 0)
        hits += drafter.draft(1, 0).tokens.item() == mx.argmax(out.logits[t + 1]).item()
    got = agreement(target, loaded.head, text, start=10, depth=3)
    assert got.matches[0] == hits and got.positions == [19, 18, 17]
    assert all(0 <= o <= 1 for o in got.overlap)


def test_sums_add():
    a, b = Agreement([2], [1], [0.5]), Agreement([8], [4], [4.5])
    assert (Agreement() + a + b).match == [0.5] and (a + b).overlap == [0.5]
    assert Agreement([0], [0], [0.0]).match == [None]
