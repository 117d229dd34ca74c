"""Arms beside the baseline: what is counted, what is said where nothing differs, what the instrument leaves alone."""

from __future__ import annotations

import helpers
import latent  # noqa: F401  (its tiny models)
import mlx.core as mx
import pytest
import tiny
import zoo
import zoo_cases
from block_faults import TIES

from mtplab.backend import numerics
from mtplab.decode.settings import Settings
from mtplab.decode.stopping import Stops
from mtplab.diagnose import reference as reference_module
from mtplab.diagnose import state
from mtplab.diagnose.candidates import Candidate
from mtplab.diagnose.diverge import AGAIN, Diagnoser, Text
from mtplab.diagnose.intervene import explain
from mtplab.diagnose.locate import locate
from mtplab.diagnose.reference import Reference
from mtplab.diagnose.shadow import Shadow
from mtplab.diagnose.summary import document
from mtplab.errors import RequestError
from mtplab.models.cache import kind as kind_of
from mtplab.models.cache import leaf_arrays
from mtplab.report.divergence import render

SCRIPTED = Candidate("scripted3", "scripted", 3)
DEPTH0 = Candidate("depth0", "none", 0)


def diagnose(loaded, arms, *, tokens=40, prompt=20, seeds=(3,), **options):
    texts = [Text(f"p{s}", tuple(tiny.prompt(s, prompt))) for s in seeds]
    options = {"settings": Settings(max_tokens=tokens), "head": loaded.head, "locate": locate} | options
    return Diagnoser(loaded.target, **options).run(texts, arms)


@pytest.mark.parametrize("kind", ["llama", "mimo", "qwen3_5"])
def test_every_arm_of_a_sound_model_is_equal_in_tokens_logits_and_state(load, kind):
    loaded = load(kind)
    arms = [DEPTH0, SCRIPTED, Candidate("ngram2", "ngram", 2)]
    if loaded.head is not None:
        arms += [Candidate("depth2", "mtp", 2), Candidate("adaptive", "mtp")]
    found = diagnose(loaded, arms)
    for arm in arms:
        seen = found.prompts[0].lanes[arm.name]
        assert found.verdicts[arm.name]["p3"].verdict == "equal"
        assert seen.compared == 40 and seen.rows_differ == 0 and seen.state_rounded == 0 and seen.state_equal > 10
    assert found.reproducible and not any(found.evidence.values())
    if loaded.head is not None:
        assert found.prompts[0].lanes["depth2"].head_audited > 10


def test_a_head_with_two_caches_a_layer_is_compared_like_any_other(load):
    """An indexer beside the attention. Past `index_topk` rows it lists the same ids in another order for one row than
    for several: rounding, which no verdict may take for another choice."""
    loaded = load("deepseek_v32")
    found = diagnose(loaded, [DEPTH0, SCRIPTED, Candidate("depth2", "mtp", 2)], tokens=24)
    for arm, by in found.verdicts.items():
        assert by["p3"].verdict == "equal", (arm, by["p3"].reason)
    seen = found.prompts[0].lanes["depth2"]
    assert seen.head_audited > 10 and seen.rows_differ > 0 and seen.worst.relative < 1e-5
    assert found.evidence["depth2"][0].first_module == "model.layers.0.self_attn.indexer"


def test_the_baseline_beside_the_arms_is_the_ordinary_baseline(load):
    loaded, settings = load("llama"), Settings(max_tokens=40)
    found = diagnose(loaded, [SCRIPTED])
    assert found.prompts[0].tokens == helpers.tokens_of(
        helpers.run_baseline(loaded.target, tiny.prompt(3, 20), settings)
    )


def test_the_script_plays_full_acceptance_rejects_and_second_rejects(load):
    seen = diagnose(load("llama"), [SCRIPTED], tokens=160).prompts[0].lanes["scripted3"]
    assert {a for (k, a) in seen.accepted if k == 3} == {0, 1, 2, 3} and seen.second_rejects > 3


@pytest.fixture
def noisy(load):
    """A diagnosis of a model under simulated noise, its loaded model, and an ordinary run of the arm."""
    loaded = load("llama")
    kept = mx.array(loaded.target.outer.lm_head.weight)
    zoo.pair_rows(loaded, TIES)
    with numerics.simulate(loaded.target, "noise:1e-4@layers.1.mlp.*"):
        yield diagnose(loaded, [DEPTH0, SCRIPTED], tokens=96, seeds=(3, 4)), loaded
    loaded.target.outer.lm_head.weight = kept


def test_after_a_divergence_the_arm_is_rejoined_and_all_of_them_are_counted(noisy):
    found, _ = noisy
    for prompt in found.prompts:
        seen = prompt.lanes["scripted3"]
        assert seen.compared == 96, "every token is compared once, whatever left before it"
        assert len(seen.leaves) >= 2
        assert [x.position for x in seen.leaves] == sorted({x.position for x in seen.leaves})
        for leave in seen.leaves:
            assert leave.token == prompt.tokens[leave.position] != leave.other
            assert 0 <= leave.gap <= 2 * leave.row_diff and leave.baseline.first == leave.token
            assert leave.arm.first == leave.other
    row = next(a for a in document(found)["arms"] if a["arm"] == "scripted3")
    total = sum(len(p.lanes["scripted3"].leaves) for p in found.prompts)
    assert row["divergence_per_1k"] == pytest.approx(1000 * total / 192)


def test_the_first_divergence_is_that_of_an_ordinary_run(noisy):
    """Forcing changes nothing before the first divergence: the arm run freely leaves at the same token."""
    from mtplab.decode.drafters.simple import ScriptedDrafter
    from mtplab.diagnose.candidates import ScriptedText

    found, loaded = noisy
    prompt = found.prompts[0]
    script = ScriptedText.script_of(3)
    drafter = ScriptedDrafter(prompt.tokens, script, loaded.target.vocab)
    free = helpers.tokens_of(
        helpers.run_speculative(loaded.target, prompt.text.tokens, Settings(max_tokens=96), drafter, 3)
    )
    first = next(i for i, (a, b) in enumerate(zip(free, prompt.tokens, strict=True)) if a != b)
    assert first == prompt.lanes["scripted3"].leaves[0].position
    assert free[first] == prompt.lanes["scripted3"].leaves[0].other


def test_noise_is_measured_and_one_row_has_none(noisy):
    found, _ = noisy
    evidence = found.evidence["scripted3"][0]
    assert evidence.replay_noise[1] == 0 and evidence.replay_noise[4] > 0
    assert evidence.noise >= evidence.leave.gap / 2
    assert evidence.first_module == "model.layers.1.mlp.gate_proj"
    assert evidence.seen.shadow_row_diff == 0, "the arm does what the same blocks do without its loop"
    assert evidence.seen.shadow_states == evidence.seen.shadow_states_equal > 0


def test_gaps_and_layers_are_summed_up_over_all_of_them(noisy):
    """Noise in layer 1's MLP: layers 0 and 1 keep their bits, layer 2 gets what layer 1 made of it."""
    made = document(noisy[0])
    gaps = [x["gap"] for a in made["arms"] for x in a["divergences"]]
    assert made["gaps"]["count"] == len(gaps) == sum(made["gaps"]["logits"]["counts"]) > 3
    assert made["gaps"]["largest"] == max(gaps) and sum(made["gaps"]["ulps"]["counts"]) == len(gaps)
    units = [x["gap_ulps"] for a in made["arms"] for x in a["divergences"]]
    assert made["gaps"]["largest_ulps"] == max(units)
    layers = made["state"]["layers"]
    assert [x["differ"] > 0 for x in layers] == [False, False, True]
    assert all(x["equal"] + x["differ"] == made["state"]["audited"] for x in layers)
    assert layers[2]["largest_relative"] == made["state"]["largest_relative"] > 0
    text = " ".join(render(made, "table").split())
    assert f"gaps of all {len(gaps)} divergences" in text and "2 layers equal in every bit throughout, 1 not" in text


def test_a_fault_on_one_prompt_is_not_covered_by_the_near_ties_of_the_others(load):
    """Three prompts leave by rounding and the fourth is long, and its old rows are overwritten."""
    loaded = load("llama")
    kept = mx.array(loaded.target.outer.lm_head.weight)
    zoo.pair_rows(loaded, TIES)

    texts = [Text(f"p{s}", tuple(tiny.prompt(s, 60 if s == 6 else 20))) for s in (3, 4, 5, 6)]
    with numerics.simulate(loaded.target, "noise:1e-4@layers.1.mlp.*"):
        found = Diagnoser(
            loaded.target, settings=Settings(max_tokens=24), locate=locate, tamper=zoo_cases.late_overwrite(1, 60)
        ).run(texts, [SCRIPTED])
    loaded.target.outer.lm_head.weight = kept
    verdicts = {p: v.verdict for p, v in found.verdicts["scripted3"].items()}
    assert verdicts == {"p3": "numeric", "p4": "numeric", "p5": "numeric", "p6": "logic"}
    assert found.verdicts["scripted3"]["p6"].layer == 1 and not document(found)["state"]["clean"]


def test_a_state_that_is_off_once_only_is_no_equality(load):
    """No token differs, and the second run does not show it again: that is said, and nothing is called equal."""
    calls = []

    def tamper(parts):
        calls.append(1)
        return zoo_cases.late_overwrite(1, 0)(parts) if len(calls) == 1 else parts

    found = diagnose(load("llama"), [SCRIPTED], tokens=16, tamper=tamper)
    verdict, made = found.verdicts["scripted3"]["p3"], document(found)
    assert verdict.verdict == "unknown" and "in a closer look by 0 only" in verdict.reason
    assert not made["state"]["clean"] and "why unknown" in render(made, "table")


def test_a_control_that_cannot_differ_does_not(noisy):
    found, _ = noisy
    assert found.verdicts["depth0"]["p3"].verdict == "equal" and found.prompts[0].lanes[AGAIN].rows_differ == 0
    controls = document(found)["controls"]
    assert controls["baseline_reproducible"] and controls["depth0_equal"] and controls["one_row_equal"]


def test_a_model_that_does_not_repeat_itself_is_said_to_be_so(load):
    loaded = load("llama")
    with numerics.simulate(loaded.target, "jitter:1e-2@*"):
        found = diagnose(loaded, [DEPTH0, SCRIPTED], tokens=64)
    assert not found.reproducible
    every = {v.verdict for by in found.verdicts.values() for v in by.values()}
    assert "numeric" not in every and "logic" not in every and "unknown" in every
    assert "does not repeat itself" in found.verdicts["scripted3"]["p3"].reason


def test_the_end_of_text_ends_every_arm_alike(load):
    loaded = load("llama")
    text = diagnose(loaded, []).prompts[0].tokens
    eos = next(t for i, t in enumerate(text) if i > 5 and t not in text[:i])
    found = diagnose(loaded, [DEPTH0, SCRIPTED], stops=lambda: Stops(Settings(max_tokens=40), frozenset([eos])))
    at = text.index(eos) + 1
    for arm in ("depth0", "scripted3"):
        assert found.prompts[0].lanes[arm].compared == at and found.prompts[0].lanes[arm].end == "eos"
        assert found.verdicts[arm]["p3"].verdict == "equal"


def test_a_prompt_that_leaves_no_state_is_refused(load):
    with pytest.raises(RequestError, match="'p3' has 1 token; diverge needs two or more"):
        diagnose(load("llama"), [DEPTH0], prompt=1)


def test_the_intervention_replays_the_prefill_that_was_asked_for(noisy):
    """The prompt one token at a time: every divergence shows again along the chain of its passes."""
    _, loaded = noisy
    settings = Settings(max_tokens=96, prefill_step=1)
    found = diagnose(loaded, [SCRIPTED], seeds=(3, 4), settings=settings, explain=explain)
    assert found.explained.chain.total == found.explained.asked > 3


def test_noise_whose_state_is_gone_is_not_measured_rather_than_none(noisy, monkeypatch):
    _, loaded = noisy
    monkeypatch.setattr(Reference, "copy_at", lambda self, length: None)
    found = diagnose(loaded, [SCRIPTED], tokens=96)
    (evidence,), made = found.evidence["scripted3"], document(found)
    assert evidence.replay_noise == {} and made["noise_by_width"] == {}
    assert made["controls"]["one_row_equal"] is None and made["noise"] == evidence.leave.noise > 0
    assert "was not found: its state was gone" in " ".join(render(made, "table").split())


def test_sampling_is_refused(load):
    with pytest.raises(RequestError, match="greedy"):
        Diagnoser(load("llama").target, settings=Settings(temp=0.5))


@pytest.mark.parametrize(
    "kind, options", [("llama", {}), ("gemma3_text", {}), ("qwen3_5", {}), ("llama", {"kv_bits": 8})]
)
def test_a_shadow_keeps_what_one_token_at_a_time_would_have_written(load, kind, options):
    build = {"head_dim": 64} if options else {}
    target, prompt = load(kind, build=build, **options).target, tiny.prompt(3, 20)
    shadow, text = Shadow(target, prompt, Settings()), tiny.prompt(4, 40)
    at = 0
    for width, keep in ((4, 1), (4, 4), (1, 1), (3, 2), (4, 1), (2, 2), (1, 1), (4, 3)):
        shadow.feed([*text[at : at + keep], *[1] * (width - keep)], keep)
        at += keep
        serial = target.new_cache()
        target.forward(mx.array(prompt[:-1]), serial)
        for token in [prompt[-1], *text[:at]]:
            target.forward(mx.array([token]), serial)
            mx.eval(serial.arrays())
        found = state.compare(state.leaves(shadow.cache), state.leaves(serial), 20 + at)
        # Past its window a ring sums in another order: rounding, nothing more.
        assert all(d.relative < 1e-5 and not d.rows for d in found), (kind, at, found)
        assert kind == "gemma3_text" or not found


def test_the_state_audit_sees_one_changed_value(load):
    target = load("llama").target
    one, two = (target.new_cache() for _ in range(2))
    for cache in (one, two):
        target.forward(mx.array([1, 2, 3, 4]), cache)
        mx.eval(cache.arrays())
    assert state.compare(state.leaves(one), state.leaves(two), 4) == []
    two.layers[1].keys[0, 1, 2, 3] += 0.5
    found = state.compare(state.leaves(one), state.leaves(two), 4)
    assert [(d.layer, d.part, d.differing) for d in found] == [(1, "keys", 1)]
    assert found[0].abs_max == pytest.approx(0.5, rel=1e-5) and not found[0].equal
    two.layers[2].offset = 3
    assert [(d.layer, d.part, d.rows) for d in state.compare(state.leaves(two), state.leaves(one), 4)][1:] == [
        (2, "length", -1)
    ]


def test_the_diagnosis_leaves_the_model_as_it_was(load):
    """Same tokens before and after, no wrapped modules left over."""
    loaded, settings = load("qwen3_5"), Settings(max_tokens=24)
    before = helpers.tokens_of(helpers.run_baseline(loaded.target, tiny.prompt(3, 20), settings))
    classes = [type(m) for m in loaded.target.model.modules()]
    diagnose(loaded, [SCRIPTED], tokens=24)
    assert [type(m) for m in loaded.target.model.modules()] == classes
    assert helpers.tokens_of(helpers.run_baseline(loaded.target, tiny.prompt(3, 20), settings)) == before


def reference_of(loaded, tokens: int) -> Reference:
    diagnoser = Diagnoser(loaded.target, settings=Settings(max_tokens=tokens))
    return diagnoser._reference(Text("a", tuple(tiny.prompt(3, 20))), 0)


def test_memory_does_not_grow_with_the_text(load):
    """Rows and states of the baseline are dropped; twice the tokens keep no more of them."""
    loaded, kept = load("llama"), []
    for tokens in (100, 200):
        reference = reference_of(loaded, tokens)
        reference.finish()
        kept.append(len(reference.rows))
    assert kept[0] == kept[1] <= 49


WINDOW = {"build": {"sliding_window": 512}}


@pytest.mark.parametrize(
    "kind, options, caches", [("llama", {"max_kv_size": 512}, 1.4), ("gemma3_text", WINDOW, 1.4), ("qwen3_5", {}, 16)]
)
def test_memory_holds_few_copies_of_a_state(load, kind, options, caches):
    """A ring once, with the rows that were lately written over; a recurrent state as often as an arm may ask for it."""
    loaded = load(kind, **options)
    reference = reference_of(loaded, 600 if kind != "qwen3_5" else 100)
    mx.eval(loaded.target.model.parameters())
    mx.clear_cache()
    before = mx.get_active_memory()
    reference.finish()
    mx.synchronize()
    rows = sum(row.logits.nbytes + row.hidden.nbytes for row in reference.rows.values())
    bytes_of = {True: 0, False: 0}  # plain KV is shared by all states
    for _, leaf in state.leaves(reference.cache):
        bytes_of[kind_of(leaf) == "plain"] += sum(a.nbytes for a in leaf_arrays(leaf))
    assert mx.get_active_memory() - before - rows - bytes_of[True] < caches * bytes_of[False]


@pytest.mark.parametrize("kind, options", [("llama", {"max_kv_size": 16}), ("gemma3_text", {}), ("qwen3_5", {})])
def test_the_last_states_of_the_baseline_are_those_of_a_run_that_stopped_there(load, kind, options):
    """Before a ring is full, while it grows, and after it wrapped: in bits, and in the order of its rows."""
    loaded = load(kind, **options)
    for tokens in (4, 30, 60):
        reference, prompt = reference_of(loaded, tokens), tiny.prompt(3, 20)
        reference.finish()
        newest, held = max(reference.rows), 0
        for position in range(newest + 1):
            got = reference.state_at(20 + position)
            if got is None:
                continue
            serial, held = loaded.target.new_cache(), held + 1
            loaded.target.forward(mx.array(prompt[:-1]), serial)
            for token in [prompt[-1], *reference.tokens[:position]]:
                loaded.target.forward(mx.array([token]), serial)
                mx.eval(serial.arrays())
            want = state.leaves(serial)
            assert state.compare(want, got, 20 + position) == []
            for (_, a), (_, b) in zip(got, want, strict=True):
                if hasattr(a, "_idx"):
                    assert a._idx == b._idx and mx.array_equal(a.keys, b.keys) and mx.array_equal(a.values, b.values)
        assert held == min(newest + 1, reference_module.STATES if kind == "qwen3_5" else reference_module.KEPT)


@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3_text"])
def test_the_deepest_arms_find_every_state_that_they_are_compared_with(load, kind):
    loaded = load(kind)
    arms = [DEPTH0, Candidate("scripted8", "scripted", 8), Candidate("scripted1", "scripted", 1)]
    lanes = diagnose(loaded, arms, tokens=60).prompts[0].lanes
    for arm in arms:
        seen = lanes[arm.name]
        assert seen.state_equal + seen.state_rounded == len(seen.passes) + 1, "of every pass and of the prefill"
    assert (8, 8) in lanes["scripted8"].accepted


def test_the_state_before_a_block_stays_as_long_as_a_closer_look_may_ask(load):
    reference = reference_of(load("qwen3_5"), 40)
    reference.reach(4)
    reference.pin(23)
    kept = reference.state_at(23)
    reference.reach(30)
    assert reference.state_at(22) is None
    assert state.compare(state.leaves(reference.copy_at(23)), kept, 23) == []
    reference.pin(28)
    assert reference.state_at(23) is None
