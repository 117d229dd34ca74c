"""Every head family: the published layout loads strictly, trunk and head equal transformers, the loop equals the
baseline, and the converted and quantized layouts say the same."""

from __future__ import annotations

import itertools

import families
import helpers
import mlx.core as mx
import numpy as np
import published
import pytest
import tiny
from exports import convert

from mtplab.decode.drafters.mtp import MTPDrafter
from mtplab.decode.drafters.simple import ScriptedDrafter
from mtplab.decode.selection import Draws
from mtplab.decode.settings import Settings
from mtplab.models.inspect import inspect_checkpoint
from mtplab.models.loader import load_target

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
ALL = list(families.FAMILIES)


@pytest.fixture(scope="module")
def loaded(made):
    opened = {}

    def get(family, **options):
        key = (family, tuple(sorted(options.items())))
        if key not in opened:
            opened[key] = load_target(made(family).folder, **options)
        return opened[key]

    return get


def reference_hidden(m, spec):
    post, pre = m.trunk(TOKENS)
    return pre if spec.hidden == "pre" else post


def close(a, b, tolerance):
    np.testing.assert_allclose(np.array(a), b.detach().numpy(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("family", ALL)
def test_trunk_logits_are_transformers(made, loaded, family):
    m, target = made(family), loaded(family).target
    post, pre = m.trunk(TOKENS)
    out = target.forward(mx.array(TOKENS), target.new_cache())
    close(out.logits, m.main.lm_head(post), 1e-4)
    close(out.hidden, pre if target.hidden == "pre" else post, 1e-4)
    assert float(post.std()) > 0.1 and float(m.main.lm_head(post).detach().std()) > 2
    cache = target.new_cache()
    parts = [target.forward(mx.array(TOKENS[a:b]), cache).logits for a, b in ((0, 5), (5, 6), (6, 12))]
    close(mx.concatenate(parts), m.main.lm_head(post), 1e-4)


@pytest.mark.parametrize("family", ALL)
def test_head_is_the_plain_reference_at_depth_1_to_3(made, loaded, family):
    """Chained from the reference's own states, so that every depth is compared on equal input."""
    m, head = made(family), loaded(family).head
    state = reference_hidden(m, head.spec)[:-1]
    for depth in (1, 2, 3):
        i = (depth - 1) % len(m.layers)
        block, normed, logits = m.plain(i, TOKENS[depth:], state)
        following, got = head.rows(mx.array(TOKENS[depth:]), mx.array(state.numpy()), None, depth=depth)
        close(head.logits(got, depth), logits, 1e-5)
        wanted = normed if head.spec.recursion == "final" else block
        close(following, wanted, 2e-5)
        state = wanted[:-1]


@pytest.mark.parametrize("family", [f for f in ALL if f not in families.OWN_BLOCKS and f != "glm_moe_dsa"])
def test_head_is_transformers_mtp_model(made, loaded, family):
    """`MtpModel` recurses on the normed output in every family."""
    m, head = made(family), loaded(family, recursion="final").head
    assert m.mtp is not None
    state = m.trunk(TOKENS)[0][:-1]
    for depth in (1, 2, 3):
        normed, logits = m.by_mtp_model((depth - 1) % len(m.layers), TOKENS[depth:], state)
        following, got = head.rows(mx.array(TOKENS[depth:]), mx.array(state.numpy()), None, depth=depth)
        close(head.logits(got, depth), logits, 1e-4)
        close(following, normed, 1e-4)
        state = normed[:-1]


@pytest.mark.parametrize("family", ALL)
def test_head_cached_primed_and_not(made, loaded, family):
    """Rows fed in any blocks equal the reference over all rows; without the rows before, it is another answer."""
    m, head = made(family), loaded(family).head
    hidden = reference_hidden(m, head.spec)[:-1]
    wanted, ours = m.plain(0, TOKENS[1:], hidden)[2], mx.array(hidden.numpy())
    for cuts in ((0, 11), (0, 4, 5, 8, 11), tuple(range(12))):
        cache, parts = head.new_cache(), []
        for a, b in itertools.pairwise(cuts):
            _, normed = head.rows(mx.array(TOKENS[1 + a : 1 + b]), ours[a:b], cache)
            parts.append(head.logits(normed))
        close(mx.concatenate(parts), wanted, 2e-5)
    alone = m.plain(0, TOKENS[8:], hidden[7:])[2]
    _, normed = head.rows(mx.array(TOKENS[8:]), ours[7:], head.new_cache())
    close(head.logits(normed), alone, 2e-5)
    assert float((alone - wanted[7:]).abs().max()) > 0.1, "priming matters"


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_every_acceptance_pattern_gives_the_baseline(loaded, family, k):
    one, settings, prompt = loaded(family), Settings(max_tokens=9), tiny.prompt(3, 7)
    future = helpers.tokens_of(helpers.run_baseline(one.target, prompt, Settings(max_tokens=14)))
    expected = helpers.tokens_of(helpers.run_baseline(one.target, prompt, settings))
    for pattern in itertools.product(range(k + 1), repeat=2):
        drafter = ScriptedDrafter(future, list(pattern), tiny.VOCAB)
        records = list(helpers.run_speculative(one.target, prompt, settings, drafter, k))
        assert helpers.tokens_of(records) == expected, pattern
    for history in ("verified", "none"):
        drafter = MTPDrafter(one.head, settings, Draws(0, 0), history=history)
        assert helpers.tokens_of(helpers.run_speculative(one.target, prompt, settings, drafter, k)) == expected


@pytest.mark.parametrize("family", ALL)
def test_converted_and_quantized_exports(loaded, tmp_path, family):
    """MLX names, stacked experts, shifted norms: the same numbers. Quantized: those of its own dequantized weights."""
    one = loaded(family)
    plain = load_target(convert(one, tmp_path / "plain"))
    kind = {"group_size": 32, "bits": 4, "mode": "affine"}
    packed, unpacked = (load_target(convert(one, tmp_path / n, kind, unpack=n == "u")) for n in "pu")
    assert packed.facts["quantized"] and not unpacked.facts["quantized"]
    for a, b, tolerance in ((plain, one, 1e-6), (packed, unpacked, 2e-4)):
        out, ref = (x.target.forward(mx.array(TOKENS), x.target.new_cache()) for x in (a, b))
        assert mx.allclose(out.logits, ref.logits, atol=tolerance), family
        heads = [x.head.logits(x.head.rows(mx.array(TOKENS[1:]), ref.hidden[:-1], None)[1]) for x in (a, b)]
        assert mx.allclose(*heads, atol=tolerance), family


@pytest.mark.parametrize("family", ALL)
def test_inspect_says_the_right_things(made, loaded, family):
    told, head = inspect_checkpoint(made(family).folder), loaded(family).head
    assert told["head"]["status"] == "present" and told["head"]["family"] == family
    assert told["head"]["declared_layers"] == len(head.layers)
    assert told["arms"]["depth1..8"] == "yes"
    assert told["bytes"]["total"] == sum(a.numel() * a.element_size() for a in made(family).tensors.values())


def test_weights_exist_once(loaded):
    """The head reads the trunk's tables; DeepSeek's copies of them in the file are not kept."""
    for family in ("mimo", "deepseek_v3", "nemotron_h"):
        one = loaded(family)
        target, head = one.target, one.head
        assert head._target is target
        assert not {n.split(".")[2] for n in head.file_names} & {"embed", "unembed"}
        assert target.embedding.weight is next(iter(dict(target.inner.items()).values())).weight
    step = loaded("step3p5").head
    assert len({id(x.unembed.weight) for x in step.layers}) == 3, "Step's own unembeddings are kept"


def test_a_copy_of_a_table_that_differs_is_the_heads_own(made, tmp_path):
    m = made("deepseek_v3")
    name = "model.layers.2.shared_head.head.weight"
    changed = m.tensors | {name: m.tensors[name] * -1.0}
    one = load_target(published.write(m, tmp_path / "own", changed))
    _, normed = one.head.rows(mx.array([1, 2]), mx.array(m.trunk([3, 4])[0].numpy()), None)
    assert mx.allclose(one.head.logits(normed, 1), -one.head.logits(normed, 2), atol=1e-5)


WIRING = {
    "mimo": ("he", "post", "final"), "qwen3_next": ("eh", "post", "final"), "qwen3_5": ("eh", "post", "final"),
    "qwen3_5_moe": ("eh", "post", "final"), "deepseek_v3": ("eh", "post", "block"),
    "deepseek_v32": ("eh", "post", "block"), "glm_moe_dsa": ("eh", "post", "final"),
    "glm4_moe": ("eh", "post", "block"), "glm4_moe_lite": ("eh", "post", "block"), "step3p5": ("eh", "pre", "block"),
    "nemotron_h": ("eh", "post", "final"),
}  # fmt: skip


@pytest.mark.parametrize("family", ALL)
def test_declared_wiring(loaded, family):
    """Order of the fusion, which trunk hidden, what the next depth gets: as declared, and in every record."""
    one = loaded(family)
    wanted = dict(zip(("fusion", "hidden", "recursion"), WIRING[family], strict=True))
    assert {k: one.facts["head"][k] for k in wanted} == wanted
    assert one.target.hidden == wanted["hidden"]
