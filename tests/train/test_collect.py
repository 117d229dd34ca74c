"""What is stored is what the target would do."""

from __future__ import annotations

import helpers
import mlx.core as mx
import numpy as np
import pytest
import tiny
import trainlab

from mtplab.decode.settings import Settings
from mtplab.errors import ModelError, RequestError
from mtplab.train import collect
from mtplab.train.plan import HeadPlan
from mtplab.train.texts import HELD, Start, Texts

PLAN = HeadPlan(model="m", steps=1, **trainlab.SMALL)


def starts(*kinds_and_lengths):
    return [Start("c", kind, tuple(tiny.prompt(i, n))) for i, (kind, n) in enumerate(kinds_and_lengths)]


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "gemma3_text"])
def test_rows_hold_the_targets_own_text_and_states(load, kind):
    """Greedy rows are the baseline's tokens, text rows the text; states, normalizers and likely ids are those of a
    plain forward pass over the finished row, though rows of different lengths were generated together."""
    target = load(kind).target
    begun = starts(("greedy", 5), ("text", 32), ("sampled", 3), ("greedy", 9))
    rows = collect.generate(target, PLAN, begun, "x", lambda at: None)
    for start, row in zip(begun, rows, strict=True):
        ids = row["tokens"].tolist()
        assert tuple(ids[: len(start.tokens)]) == start.tokens and row["given"] == len(start.tokens)
        if start.kind == "greedy":
            settings = Settings(max_tokens=PLAN.length - len(start.tokens), ignore_eos=True)
            assert ids[len(start.tokens) :] == helpers.tokens_of(helpers.run_baseline(target, start.tokens, settings))
        out = target.forward(mx.array(ids), target.new_cache())
        assert np.abs(row["hidden"] - np.array(out.hidden)).max() < 0.02
        assert np.allclose(row["norm"], np.array(mx.logsumexp(out.logits, axis=-1)), atol=1e-3)
        likely = np.argsort(-np.array(out.logits), axis=-1)[:, 0]
        assert all(first in top for first, top in zip(likely, row["top"], strict=True))


def test_sampled_rows_follow_the_distribution_and_their_key(load):
    target = load("llama").target
    logits = np.array(target.forward(mx.array([5, 7]), target.new_cache()).logits[-1:])
    u = (np.arange(4000) + 0.5) / 4000
    drawn = collect._choose(np.repeat(logits, 4000, axis=0), np.zeros(4000, bool), 0.8, u)
    p = np.array(mx.softmax(mx.array(logits[0]) / 0.8))
    # Even numbers give every id its share, up to one of the 4000.
    assert np.abs(np.bincount(drawn, minlength=tiny.VOCAB) / 4000 - p).max() < 1.01 / 4000
    assert (collect._choose(logits, np.array([True]), 0.8, u[-1:]) == logits.argmax()).all()
    begun = starts(("sampled", 5), ("sampled", 5))
    one, two, three = (collect.generate(target, PLAN, begun, n, lambda at: None)["tokens"] for n in ("x", "x", "y"))
    assert (one == two).all() and (one != three).any()
    same = collect.generate(target, PLAN, [begun[0], begun[0]], "x", lambda at: None)["tokens"]
    assert (same[0] != same[1]).any(), "every row draws its own"


def test_held_out_windows_are_never_trained_on_and_do_not_move_with_the_rows(load):
    tokenizer = load("llama").tokenizer
    few, many = (Texts(HeadPlan(model="m", steps=1, **trainlab.SMALL | {"rows": n}), tokenizer, 4096) for n in (12, 96))
    for texts in (few, many):
        held, trained = (texts.windows["c"][h] for h in (True, False))
        assert held and not {p.id for p in held} & {p.id for p in trained}
        for held_out, windows in ((True, held), (False, trained)):
            begun = [s.tokens for i in range(6) for s in texts.starts(i, 12, held_out=held_out)]
            assert {b[:8] for b in begun} <= {p.tokens[:8] for p in windows}
            assert len({b[:8] for b in begun}) > 1
    assert few.windows == many.windows
    windows = few.windows["c"]
    assert len(windows[True]) == max(1, (len(windows[True]) + len(windows[False])) // HELD)


def test_kinds_and_corpora_take_turns(load, tmp_path):
    (tmp_path / "other.txt").write_text("abc def ghi " * 400)
    plan = HeadPlan(model="m", steps=1, **trainlab.SMALL | {"corpora": ("c", str(tmp_path / "other.txt"))})
    made = Texts(plan, load("llama").tokenizer, 4096).starts(0, 12)
    assert [s.corpus for s in made[:4]] == ["c", "other", "c", "other"]
    assert [s.kind for s in made[::2]] == ["text", "greedy", "sampled", "sampled", "text", "greedy"]
    assert {len(s.tokens) for s in made if s.kind == "text"} == {32}
    assert {len(s.tokens) for s in made if s.kind != "text"} == {8}


def test_a_file_is_whole_or_absent_and_checked(tmp_path, load):
    target = load("llama").target
    rows = collect.generate(target, PLAN, starts(("text", 32)), "x", lambda at: None)
    path = tmp_path / "rows.npy"
    collect.save(path, rows)
    assert [p.name for p in tmp_path.iterdir()] == ["rows.npy"]
    assert np.array_equal(collect.open_rows(path, PLAN, 32)["tokens"], rows["tokens"])
    with pytest.raises(RequestError, match="holds other rows than this plan makes"):
        collect.open_rows(path, PLAN, 64)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RequestError, match=r"rows\.npy cannot be read .*; delete it and resume"):
        collect.open_rows(path, PLAN, 32)
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(RequestError, match="cannot be read"):
        collect.open_rows(path, PLAN, 32)


def test_states_that_are_not_the_logits_source_are_refused(load, monkeypatch):
    target = load("llama").target
    monkeypatch.setattr(type(target), "unembed", lambda self, h: 2 * (h @ self.outer.lm_head.weight.T))
    with pytest.raises(ModelError, match="not its unembedding"):
        collect.generate(target, PLAN, starts(("text", 32)), "x", lambda at: None)


def test_a_corpus_too_short_to_hold_anything_out(load, tmp_path):
    (tmp_path / "s.txt").write_text("abcdef")
    plan = HeadPlan(model="m", steps=1, **trainlab.SMALL | {"corpora": (str(tmp_path / "s.txt"),)})
    with pytest.raises(RequestError, match="gives 1 windows of 32 tokens"):
        Texts(plan, load("llama").tokenizer, 4096)


def test_a_file_that_a_smaller_plan_left_half_filled_is_made_anew(tmp_path):
    path = tmp_path / "rows-00001.npy"
    assert not collect._whole(path, 6)
    np.save(path, np.zeros((2, 3)))
    assert collect._whole(path, 2) and not collect._whole(path, 6)
    path.write_bytes(b"\x93NUMPY damaged")
    assert collect._whole(path, 6), "damage is for open_rows to name"
