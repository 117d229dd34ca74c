"""The state audit's numbers, against numpy; and what it may leave out."""

from __future__ import annotations

import block_faults
import faults
import mlx.core as mx
import numpy as np
import pytest
import tiny
from latent import FEWER

from mtplab.backend import numerics
from mtplab.decode.settings import Settings
from mtplab.diagnose import state
from mtplab.diagnose.candidates import Candidate
from mtplab.diagnose.diverge import AGAIN, Diagnoser, Text
from mtplab.diagnose.lane import LATER
from mtplab.diagnose.locate import locate
from mtplab.diagnose.reference import AHEAD, choices, read_choices
from mtplab.models.cache import kind
from mtplab.models.target import Target

LENGTH = 24


@pytest.fixture
def two(load):
    """The states of two runs of the same tokens, the second with noise on the rows of two layers."""
    target = load("gemma3_text").target  # windows of 16 beside plain layers
    caches = [target.new_cache() for _ in range(2)]
    for cache in caches:
        for token in tiny.prompt(4, LENGTH):
            target.forward(mx.array([token]), cache)
        mx.eval(cache.arrays())
    first, second = (state.leaves(c) for c in caches)
    mx.random.seed(1)
    for layer, at in ((0, 20), (1, 3), (2, 21)):
        leaf = second[layer][1]
        leaf.keys[..., at % leaf.keys.shape[2], :] += 1e-3 * mx.random.normal((leaf.keys.shape[-1],))
        leaf.values[..., at % leaf.keys.shape[2], 2] *= 1.5
    return first, second


def by_hand(first, second, newest=None):
    """(layer, part) -> differing, abs_max, relative, in float64."""
    out = {}
    for (layer, a), (_, b) in zip(first, second, strict=True):
        for name, x in state.contents(a, LENGTH).items():
            x, y = (np.array(v, dtype=np.float64) for v in (x, state.contents(b, LENGTH)[name]))
            if np.array_equal(x, y):
                continue
            if newest is not None:
                x, y = x[..., -newest:, :], y[..., -newest:, :]
            d = x - y
            share = np.sqrt((d**2).sum(axis=(0, 1, 3)) / (y**2).sum(axis=(0, 1, 3)))
            out[layer, name] = (int((x != y).sum()), np.abs(d).max(), share.max())
    return out


@pytest.mark.parametrize("together", [1, 700, 1 << 16])
@pytest.mark.parametrize("newest", [None, 8])
def test_what_is_measured_of_every_part_is_what_numpy_measures(two, newest, together, monkeypatch):
    monkeypatch.setattr(state, "TOGETHER", together)
    wanted = by_hand(*two, newest=newest)
    assert len(wanted) == 6 and len({v[2] for v in wanted.values()}) > 3
    for known in ((), {(layer, 0, part) for layer, part in wanted}):
        found = {(d.layer, d.part): d for d in state.compare(*two, LENGTH, newest=newest, known=known)}
        assert found.keys() == wanted.keys()
        for key, (differing, most, share) in wanted.items():
            d = found[key]
            assert (d.rows, d.differing) == (0, differing)
            assert (d.abs_max, d.relative) == (pytest.approx(most, rel=1e-4), pytest.approx(share, rel=1e-4))


def alike(target):
    """The states of two caches that were given the same prompt."""
    caches = [target.new_cache() for _ in range(2)]
    for cache in caches:
        target.forward(mx.array(tiny.prompt(4, LENGTH)), cache)
        mx.eval(cache.arrays())
    return [state.leaves(c) for c in caches]


def test_a_part_that_is_known_to_differ_still_shows_missing_rows_and_others_are_still_asked(load):
    one, two = alike(load("llama").target)
    two[1][1].keys[..., 2, :] += 1.0
    known = {(0, 0, "keys"), (0, 0, "values")}
    found = state.compare(one, two, LENGTH, newest=8, known=known)
    assert [(d.layer, d.part, d.differing) for d in found] == [(0, "keys", 0), (0, "values", 0), (1, "keys", 0)]
    two[0][1].keys = two[0][1].keys[..., : LENGTH - 3, :]
    found = state.compare(one, two, LENGTH, newest=8, known=known)
    assert [(d.layer, d.part, d.relative) for d in found][:1] == [(0, "keys", 1.0)]


def test_what_is_known_of_an_attention_is_not_known_of_the_indexer_beside_it(load):
    one, two = alike(load("deepseek_v32").target)
    assert [layer for layer, _ in one] == [0, 0, 1, 1, 2, 2]
    known = {(0, 0, "keys"), (0, 0, "values")}
    found = state.compare(one, two, LENGTH, known=known)
    assert [d.place for d in found] == [(0, 0, "keys"), (0, 0, "values")]
    two[1][1].keys[..., 2, :] += 1.0
    found = state.compare(one, two, LENGTH, known=known)
    assert [d.place for d in found if d.differing] == [(0, 1, "keys")]


def test_a_window_that_is_known_to_have_differed_is_asked_again(two):
    """Its rows go, so it may be equal by now; those of plain KV stay."""
    first, _ = two
    kinds = {layer: kind(leaf) for layer, leaf in first}
    assert set(kinds.values()) == {"plain", "window"}
    known = {(layer, 0, part) for layer in kinds for part in ("keys", "values")}
    assert {kinds[d.layer] for d in state.compare(first, first, LENGTH, newest=8, known=known)} == {"plain"}


@pytest.mark.parametrize("family", ["mimo", "qwen3_5"])
def test_what_the_baseline_learns_of_many_rows_at_once_is_each_rows_own(load, family):
    """Choices, margins and the head's cache."""
    loaded, prompt, count = load(family), tuple(tiny.prompt(3, 20)), 2 * AHEAD + 3
    diagnoser = Diagnoser(loaded.target, settings=Settings(max_tokens=count), head=loaded.head)
    reference = diagnoser._reference(Text("a", prompt), 0)
    reference.finish()
    assert len(reference.tokens) == len(reference.margins) == count
    cache = loaded.head.new_cache()
    hidden = loaded.target.forward(mx.array(prompt), loaded.target.new_cache()).hidden
    for depth in range(1, len(loaded.head.layers) + 1):
        loaded.head.rows(mx.array(prompt[1:]), hidden[:-1], cache, depth=depth)
    for position in range(count):
        row = reference.rows[position]
        (choice,) = read_choices(choices(row.logits[None]))
        assert choice == reference.choices[position] and choice.gap == reference.margins[position]
        assert choice.first == reference.tokens[position]
        for depth in range(1, len(loaded.head.layers) + 1):
            loaded.head.rows(mx.array([reference.tokens[position]]), row.hidden, cache, depth=depth)
    rows = len(prompt) + count - 1
    one, two = (state.head_state(c, rows) for c in (reference.head_cache, cache))
    assert one and all(d.relative < 1e-5 for d in state.compare(one, two, rows))


def test_a_row_that_the_second_baseline_computes_otherwise_is_named_where_it_is(load):
    """It is compared later, among others."""
    loaded, at = load("llama"), LATER // 2 + 1

    class Once:
        """The second pass that feeds this row gives other logits: the first is the reference's."""

        seen = 0

        def __init__(self, target):
            self.target = target

        def __getattr__(self, name):
            return getattr(self.target, name)

        def forward(self, tokens, cache):
            out = self.target.forward(tokens, cache)
            if cache.length == 20 + at:
                Once.seen += 1
                if Once.seen == 2:
                    out.logits = out.logits.at[..., 5].add(1e3)
            return out

    diagnoser = Diagnoser(Once(loaded.target), settings=Settings(max_tokens=40))
    seen = diagnoser.run([Text("a", tuple(tiny.prompt(3, 20)))], [Candidate("depth0", "none", 0)]).prompts[0].lanes
    (leave,) = seen[AGAIN].leaves
    assert (leave.position, leave.verify, leave.other) == (at, at - 1, 5)
    assert seen[AGAIN].compared == 40 and seen[AGAIN].rows_differ == 1


def overwritten(layer, at, until=None, value=None):
    """A tamper: row 3 of a layer's values is another (or `value`) from the pass `at` on, until the pass `until`."""

    def tamper(parts):
        state_ = {"pass": 0}

        def change(cache, attempt, n, keep):
            keep(n)
            leaf = cache.layers[layer]
            if state_["pass"] == at:
                leaf.values = mx.array(leaf.values)
                state_["old"] = mx.array(leaf.values[..., 3:4, :])
                leaf.values[..., 3:4, :] = leaf.values[..., 8:9, :] if value is None else value
            if state_["pass"] == until:
                leaf.values = mx.array(leaf.values)
                leaf.values[..., 3:4, :] = state_["old"]
            state_["pass"] += 1

        return faults.on_keep(change)(parts)

    return tamper


@pytest.mark.parametrize("begin", [9, 12, 14])
def test_an_old_row_that_is_wrong_for_three_passes_is_found_under_noise(load, begin):
    """In the last layer, from which no other row of the state is computed."""
    loaded = load("llama")
    with numerics.simulate(loaded.target, "noise:1e-5@layers.0.*"):
        tamper = overwritten(2, begin, begin + 3)
        diagnoser = Diagnoser(loaded.target, settings=Settings(max_tokens=60), tamper=tamper)
        found = diagnoser.run([Text("a", tuple(tiny.prompt(3, 24)))], [Candidate("scripted3", "scripted", 3)])
    verdict = found.verdicts["scripted3"]["a"]
    assert verdict.verdict == "logic" and verdict.reason.startswith("model.layers.2: values are off"), verdict.reason
    assert verdict.verify == begin


def test_a_nan_in_an_old_row_is_no_small_difference(load):
    """In the last pass, after which nothing else shows it: before, the decoder stops at NaN."""
    target, settings, text = load("llama").target, Settings(max_tokens=40), Text("a", tuple(tiny.prompt(3, 24)))
    arm = Candidate("scripted3", "scripted", 3)
    passes = len(Diagnoser(target, settings=settings).run([text], [arm]).prompts[0].lanes["scripted3"].passes)
    tamper = overwritten(1, passes - 1, value=float("nan"))
    found = Diagnoser(target, settings=settings, tamper=tamper).run([text], [arm])
    assert found.verdicts["scripted3"]["a"].verdict == "logic"
    two = [mx.ones((1, 1, 4, 2)), mx.ones((1, 1, 4, 2))]
    two[0][..., 1, 0] = float("nan")
    (d,) = state._measured([((0, 0, "keys"), *two)], None)
    assert d.relative == float("inf") and d.differing == 1


def test_a_second_baseline_with_another_state_is_not_a_repetition(load):
    """Its last row alone is wrong in the state: no token and no logits show it."""
    loaded, prompt = load("llama"), tuple(tiny.prompt(3, 24))
    diagnoser = Diagnoser(loaded.target, settings=Settings(max_tokens=20))
    lane = diagnoser._lane

    def spoiled(candidate, reference, request, **options):
        made = lane(candidate, reference, request, **options)
        if candidate.name == AGAIN:
            ended = made._passed

            def passed(record):
                if record.cut:
                    leaf = made.parts.cache.layers[1]
                    leaf.values = mx.array(leaf.values)
                    leaf.values[..., 3:4, :] *= -1.0
                ended(record)

            made._passed = passed
        return made

    diagnoser._lane = spoiled
    assert not diagnoser.run([Text("a", prompt)], [Candidate("depth0", "none", 0)]).reproducible


def test_noise_after_the_last_cache_of_the_trunk_is_no_fault_of_the_heads_cache(load):
    """The hidden rows that a head is given are the last layer's output, which none of the trunk's caches holds."""
    loaded = load("deepseek_v32")
    with numerics.simulate(loaded.target, "noise:1e-2@layers.2.*"):
        diagnoser = Diagnoser(loaded.target, settings=Settings(max_tokens=40), head=loaded.head)
        found = diagnoser.run([Text("a", tuple(tiny.prompt(3, 24)))], [Candidate("depth2", "mtp", 2)])
    assert found.verdicts["depth2"]["a"].verdict == "equal", found.verdicts["depth2"]["a"].reason
    seen = found.prompts[0].lanes["depth2"]
    assert seen.head_audited > 10 and 0 < seen.off < 0.01


@pytest.mark.parametrize(
    "kind, number, named", [("nemotron_h", 1, "backbone.layers.2"), ("gemma4_text", 1, "model.layers.1")]
)
def test_models_with_fewer_caches_than_layers_are_looked_at_and_the_right_layer_is_named(kind, number, named):
    target = Target(tiny.made(FEWER[kind]))
    text, arm = Text("a", tuple(tiny.prompt(3, 24))), Candidate("scripted3", "scripted", 3)
    assert len(target.new_cache().layers) < len(target.model.layers)
    with numerics.simulate(target, "noise:1e-3@*"):
        diagnoser = Diagnoser(target, settings=Settings(max_tokens=24), locate=locate)
        found = diagnoser.run([text], [arm])
        assert found.verdicts["scripted3"]["a"].verdict in ("equal", "numeric")
        assert found.evidence["scripted3"][0].modules
        tamper = overwritten(number, 3)
        diagnoser = Diagnoser(target, settings=Settings(max_tokens=24), locate=locate, tamper=tamper)
        verdict = diagnoser.run([text], [arm]).verdicts["scripted3"]["a"]
    assert verdict.verdict == "logic" and verdict.reason.startswith(f"{named}: values are off"), verdict.reason


def test_rows_that_differ_are_looked_at_though_every_token_and_state_is_equal(load):
    """Nothing behind the unembedding shows what it does to a block."""
    loaded = load("llama")
    head = loaded.target.model.lm_head
    scaled = lambda inner, x: inner(x) * (1.5 if x.shape[1] > 1 else 1.0)  # noqa: E731
    with block_faults.swapped(head, scaled):
        diagnoser = Diagnoser(loaded.target, settings=Settings(max_tokens=24), locate=locate)
        found = diagnoser.run([Text("a", tuple(tiny.prompt(3, 24)))], [Candidate("scripted3", "scripted", 3)])
    seen, verdict = found.prompts[0].lanes["scripted3"], found.verdicts["scripted3"]["a"]
    assert seen.rows_differ and not seen.leaves and not seen.state_rounded
    assert (verdict.verdict, verdict.module) == ("logic", "lm_head"), verdict.reason
