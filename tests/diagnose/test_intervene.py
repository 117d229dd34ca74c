"""Row by row, the module at fault makes the divergence vanish; the smallest set is the one the cause was put into."""

from __future__ import annotations

import helpers
import pytest
import tiny

from mtplab.backend import numerics
from mtplab.decode.drafters.simple import ScriptedDrafter
from mtplab.decode.settings import Settings
from mtplab.diagnose.intervene import Case, explain, role

N = 40


def cases(target, *, seeds=range(3), length=9, pattern=(3, 0, 1, 2)):
    """The divergences of a scripted arm from the baseline, one per prompt at most."""
    found = []
    for seed in seeds:
        prompt = tiny.prompt(seed, length)
        base = helpers.tokens_of(helpers.run_baseline(target, prompt, Settings(max_tokens=N + 10)))
        drafter = ScriptedDrafter(base, pattern, tiny.VOCAB)
        records = helpers.run_speculative(target, prompt, Settings(max_tokens=N), drafter, 3)
        case = Case.from_records(prompt, base, records)
        found += [] if case is None else [case]
    return found


@pytest.mark.parametrize(
    "kind, spec, by",
    [
        ("llama", "noise:3e-2@layers.1.mlp.down_proj", "layers.1.mlp.down_proj"),
        ("mimo", "noise:2e-2@lm_head", "embed_tokens"),
        ("qwen3_5", "noise:3e-2@layers.1.linear_attn.out_proj", "layers.1.linear_attn"),
    ],
)
def test_the_cause_is_found(load, kind, spec, by):
    target = load(kind).target
    with numerics.simulate(target, spec):
        found = cases(target)
        result = explain(target, found)
    assert len(found) >= 1 and result.total >= 1
    assert result.explained == result.total == result.most and all(name.startswith(by) for name in result.by)
    assert result.sentence.endswith(f"{result.total} of {result.total}") and result.by[0] in result.sentence


def test_a_chain_of_verifies_is_its_own_measurement(load):
    """Rounding that earlier verifies left in the cache: the last pass alone, from a clean cache, does not show it."""
    target = load("llama").target
    with numerics.simulate(target, "noise:3e-2@layers.1.mlp.down_proj"):
        result = explain(target, cases(target))
    assert result.chain.total > result.decode.total and result.chain.explained == result.chain.total


def test_what_rounding_does_not_explain_stays_unexplained(load):
    """A case whose expected token is wrong in itself diverges row by row as well."""
    target = load("llama").target
    prompt = tuple(tiny.prompt(3, 9))
    base = helpers.tokens_of(helpers.run_baseline(target, prompt, Settings(max_tokens=8)))
    wrong = [*base[:4], (base[4] + 1) % tiny.VOCAB]
    case = Case(prompt, tuple(wrong), (((base[1],), 2), ((base[3],), 2)), 4)
    result = explain(target, [case])
    assert result.by == () and (result.explained, result.total, result.most) == (0, 1, 0)
    assert "no module explains any of 1" in result.sentence


def test_no_case_is_made_of_equal_records_and_none_is_shown_that_does_not_replay(load):
    target, prompt = load("llama").target, tiny.prompt(3, 9)
    assert cases(target, seeds=[3]) == []
    base = helpers.tokens_of(helpers.run_baseline(target, prompt, Settings(max_tokens=8)))
    result = explain(target, [Case(tuple(prompt), tuple(base), (((base[1],), 2), ((base[3],), 2)), 4)])
    assert result.total == 0 and result.asked == 1 and "none of 1 divergences shows" in result.sentence


def test_cases_are_cut_at_the_first_difference(load):
    target, prompt = load("llama").target, tiny.prompt(3, 9)
    base = helpers.tokens_of(helpers.run_baseline(target, prompt, Settings(max_tokens=20)))
    records = list(
        helpers.run_speculative(target, prompt, Settings(max_tokens=12), ScriptedDrafter(base, [3], tiny.VOCAB), 3)
    )
    changed = [*base[:6], (base[6] + 1) % tiny.VOCAB, *base[7:]]
    case = Case.from_records(prompt, changed, records)
    assert case.position == 6 and case.start == 5 and [kept for _, kept in case.passes] == [4, 4]
    assert Case.from_records(prompt, [base[0] + 1, *base[1:]], records) is None, "no verify made the first token"


def test_roles():
    assert role("language_model.model.layers.12.mlp.experts.3.up") == "layers.*.mlp.experts.*.up"
    assert role("model.embed_tokens") == "embed_tokens" and role("lm_head") == "lm_head"
