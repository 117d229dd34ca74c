"""The loss sees what drafting sees: chained rows, candidates, agreement."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
import tiny
from mlx.utils import tree_flatten

from mtplab.decode import quality
from mtplab.train import chain, collect
from mtplab.train.loop import agreement

LENGTH = 24


def rows_of(target, tokens, given=8) -> np.ndarray:
    """One stored row of a text, made by a plain forward pass."""
    out = target.forward(mx.array(tokens), target.new_cache())
    row = np.zeros(1, collect.record(len(tokens), out.hidden.shape[-1]))
    row["tokens"], row["hidden"], row["given"] = tokens, np.array(out.hidden), given
    row["norm"] = np.array(mx.logsumexp(out.logits, axis=-1))
    row["top"] = np.array(mx.argpartition(-out.logits, collect.TOP - 1, axis=-1)[:, : collect.TOP])
    return row


@pytest.mark.parametrize("recursion", ["final", "block"])
def test_a_whole_row_at_once_equals_drafting_position_by_position(load, recursion):
    """Depth 1 to 4 against the head's real cache (`quality._chain`), biases and a second row of a batch included."""
    loaded = load("mimo", recursion=recursion)
    ids = [tiny.prompt(s, LENGTH) for s in (1, 2)]
    outs = [loaded.target.forward(mx.array(i), loaded.target.new_cache()) for i in ids]
    hidden, embedded = mx.stack([o.hidden for o in outs]), loaded.target.embed(mx.array(ids))
    whole = chain.drafts(loaded.head.layers[0], hidden, embedded, 4, recursion=recursion)
    assert [w.shape[1] for w in whole] == [LENGTH - d for d in (1, 2, 3, 4)]
    for b in (0, 1):
        cache = loaded.head.new_cache()
        for t in range(LENGTH - 4):
            rows = quality._chain(loaded.head, mx.array(ids[b]), outs[b].hidden, cache, t, 4)
            for d, row in enumerate(rows, 1):
                got = loaded.head.logits(whole[d - 1][b, t])
                assert mx.abs(row[0] - got).max().item() < 1e-4, (b, t, d)


def test_agreement_equals_that_of_the_model_card(load):
    """`match` and `overlap` from stored float16 states, against `decode.quality` from the model itself."""
    loaded, tokens = load("mimo"), tiny.prompt(4, LENGTH)
    wanted = quality.agreement(loaded.target, loaded.head, tokens)
    got = agreement(loaded.head, loaded.target, rows_of(loaded.target, tokens, given=LENGTH), 3)
    assert got["match_own"] == [None] * 3
    # quality leaves the last row of each depth out: nobody knows the token that it feeds on next.
    for d in range(3):
        n = wanted.positions[d]
        assert abs(got["match_text"][d] * (n) - wanted.matches[d]) < 0.01
        assert abs(got["overlap_text"][d] * n - wanted.overlaps[d]) < 0.05


def test_rows_are_told_apart_by_whose_token_they_predict(load):
    loaded, tokens = load("mimo"), tiny.prompt(4, LENGTH)
    seen = {}
    for given in (10, 12):
        row = rows_of(loaded.target, tokens, given=given)
        # A head that agrees everywhere would not show the counts: take them from the shares' denominators.
        ones = [(np.ones(LENGTH - d, bool), np.ones(LENGTH - d)) for d in (1, 2, 3)]
        import mtplab.train.loop as loop

        original, loop._row = loop._row, lambda *a, ones=ones: [(same * 0 + _index(same), s) for same, s in ones]
        try:
            seen[given] = agreement(loaded.head, loaded.target, row, 3)
        finally:
            loop._row = original
    # Row t of depth d is about token t + d + 1; the mean of t over the text part is that of 0 .. given - d - 2.
    for given, got in seen.items():
        assert got["match_text"] == [(given - d - 2) / 2 for d in (1, 2, 3)]


def _index(same: np.ndarray) -> np.ndarray:
    return np.arange(len(same), dtype=float)


def plain_loss(loaded, row, depth) -> float:
    """The definition, in numpy float64, over the whole vocabulary."""
    hidden = mx.array(row["hidden"]).astype(mx.float32)
    embedded = loaded.target.embed(mx.array(row["tokens"]))
    log_p = np.array(loaded.target.unembed(hidden[0]), np.float64)
    log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
    total = 0.0
    for d, normed in enumerate(chain.drafts(loaded.head.layers[0], hidden, embedded, depth, recursion="final"), 1):
        log_q = np.array(loaded.target.unembed(normed[0]), np.float64)
        log_q -= np.log(np.exp(log_q).sum(-1, keepdims=True))
        p = np.exp(log_p[d:])
        total += chain.WEIGHTS[d - 1] * (p * (log_p[d:] - log_q)).sum(-1).mean()
    return total / sum(chain.WEIGHTS[:depth])


def sampled_loss(loaded, row, others, seed):
    rng = np.random.default_rng(seed)
    some = chain.Candidates(row["top"], row["tokens"], tiny.VOCAB, others, rng)
    return chain.loss(loaded.head.layers[0], loaded.target, row, some, depth=3).item(), some


def test_the_loss_is_the_divergence_of_the_two_distributions(load):
    loaded = load("mimo")
    row = rows_of(loaded.target, tiny.prompt(4, LENGTH))
    assert sampled_loss(loaded, row, 0, 0)[0] == pytest.approx(plain_loss(loaded, row, 3), rel=2e-3)


def test_candidates_stand_for_the_whole_vocabulary_on_average(load):
    loaded, tokens = load("mimo"), tiny.prompt(4, LENGTH)[:8] * 3
    row = rows_of(loaded.target, tokens)
    row["top"] = row["top"][..., :1]  # few likely ids, so that the random ones must do the work
    whole = plain_loss(loaded, row, 3)
    values = []
    for seed in range(60):
        value, some = sampled_loss(loaded, row, 30, seed)
        values.append(value)
        assert len(some.ids) < tiny.VOCAB and len(set(some.ids)) == len(some.ids)
        assert set(np.unique(row["top"])) | set(tokens) <= set(some.ids.tolist())
        # Each random id stands for its share of the ids that are not there exactly.
        exact = int((some.log_weight == 0).sum().item())
        assert mx.exp(some.log_weight).sum().item() == pytest.approx(tiny.VOCAB, abs=1e-2)
        assert exact < tiny.VOCAB
    assert abs(np.mean(values) - whole) < 0.1 * whole
    assert np.std(values) > 0


def test_the_trunk_gets_no_gradient_and_the_head_does(load):
    import mlx.nn as nn

    loaded = load("mimo")
    row = rows_of(loaded.target, tiny.prompt(4, LENGTH))
    layer = loaded.head.layers[0]
    layer.train()
    some = chain.Candidates(row["top"], row["tokens"], tiny.VOCAB, 0, np.random.default_rng(0))
    _, grads = nn.value_and_grad(layer, lambda: chain.loss(layer, loaded.target, row, some, depth=3))()
    flat = dict(tree_flatten(grads))
    assert set(flat) == {n for n, _ in tree_flatten(layer.parameters())}
    # A key bias shifts all scores of a query alike; everything else matters.
    assert all(mx.abs(g).max().item() > 1e-6 for n, g in flat.items() if not n.endswith("k_proj.bias"))
