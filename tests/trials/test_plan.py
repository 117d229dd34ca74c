"""A plan says all, orders fairly, and refuses what it does not know."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtplab.errors import RequestError
from mtplab.trials.plan import Plan, change, differences, load_plan, order


def test_every_round_runs_every_arm_once_in_an_order_of_its_own():
    plan = Plan(rounds=6)
    trials = order(plan)
    rounds = [[t.arm for t in trials if t.round == r] for r in range(6)]
    assert all(sorted(r) == sorted(plan.arms) for r in rounds)
    assert [t.round for t in trials] == sorted(t.round for t in trials)
    assert len({tuple(r) for r in rounds}) > 3, "the order must change between rounds"
    assert [t.number for t in trials] == list(range(36))


def test_the_order_depends_on_the_seed_alone():
    assert order(Plan(seed=1)) == order(Plan(seed=1, max_tokens=7)) != order(Plan(seed=2))


def test_no_arm_keeps_one_place_in_the_order():
    plan = Plan(rounds=40)
    places = [i % len(plan.arms) for i, t in enumerate(order(plan)) if t.arm == "baseline"]
    assert len(set(places)) == len(plan.arms)


def test_a_plan_survives_json():
    plan = Plan(arms=("baseline", "depth2"), kv_bits=4, temp=1)
    assert Plan.from_json(plan.to_json()) == plan


def test_the_digest_covers_what_is_measured_and_not_the_patience():
    assert Plan().digest == Plan(trial_timeout_s=5.0, repeat_disturbed=False).digest
    assert len({Plan().digest, Plan(temp=0.7).digest, Plan(arms=("baseline",)).digest, Plan(prime=False).digest}) == 4
    assert differences(Plan(), Plan(temp=0.7, trial_timeout_s=5.0)) == ["temp: 0.8 -> 0.7"]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    return path


def test_toml(tmp_path):
    plan = load_plan(write(tmp_path, 'arms = ["baseline", "depth1"]\nrounds = 7\ntemp = 1\n'))
    assert (plan.arms, plan.rounds, plan.temp) == (("baseline", "depth1"), 7, 1.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("round = 3", r"plan\.toml' has the unknown key 'round'; did you mean 'rounds'"),
        ("zzz = 3", r"unknown key 'zzz'; known keys: model, corpora"),
        ('rounds = "3"', r"rounds must be int, not '3'"),
        ("rounds = true", r"rounds must be int, not True"),
        ("rounds = 2.5", r"rounds must be int, not 2.5"),
        ('arms = "baseline"', r"arms must be a list of strings"),
        ("rounds = ", r"is not TOML"),
    ],
)
def test_a_wrong_key_or_type_is_named(tmp_path, text, words):
    with pytest.raises(RequestError, match=words):
        load_plan(write(tmp_path, text))


def test_unreadable_plans(tmp_path):
    with pytest.raises(RequestError, match=r"cannot be read"):
        load_plan(tmp_path / "none.toml")
    (tmp_path / "plan.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(RequestError, match=r"not UTF-8"):
        load_plan(tmp_path / "plan.toml")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rounds": 0}, "rounds is 0 but must be at least 1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"prompts": -1}, "prompts is -1"),
        ({"arms": ("depth1",)}, "lack 'baseline'"),
        ({"arms": ("baseline", "depth1", "depth1")}, "names 'depth1' twice"),
        ({"corpora": ()}, "corpora is empty"),
        ({"modes": ("warm",)}, "mode 'warm' is not one of"),
        ({"temp": 0.0}, "temp is 0.0, but the sampled mode needs"),
        ({"temp": float("nan")}, "temp is nan"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"trial_timeout_s": 0.0}, "trial_timeout_s is 0.0"),
    ],
)
def test_impossible_values_are_refused(changes, words):
    with pytest.raises(RequestError, match=words):
        Plan(**changes)


def test_temperature_zero_is_fine_where_nothing_is_sampled():
    assert Plan(modes=("greedy",), temp=0.0).temp == 0


def test_flags_change_only_what_was_asked_for():
    assert change(Plan(), {"rounds": 2, "temp": None}) == Plan(rounds=2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"modes": ["greedy"], "temp": 0.5}, "temp is for the sampled mode"),
        ({"modes": ["greedy"], "top_k": 5}, "top_k is for the sampled mode"),
        ({"kv_group_size": 32}, "kv_group_size is for a quantized cache"),
    ],
)
def test_a_setting_without_effect_is_an_error(changes, words):
    with pytest.raises(RequestError, match=words):
        change(Plan(), changes)
    assert change(Plan(), {"kv_group_size": 32, "kv_bits": 4}).kv_bits == 4


def test_a_head_option_of_a_plan_without_an_arm_for_it_is_an_error(tmp_path):
    (tmp_path / "p.toml").write_text('arms = ["baseline", "ngram2"]\nhistory = "none"\n')
    with pytest.raises(RequestError, match="history 'none' is for an MTP head"):
        change(load_plan(tmp_path / "p.toml"), {})
    mixed = change(load_plan(tmp_path / "p.toml"), {"arms": ["baseline", "ngram2", "depth1"]})
    assert mixed.history == "none", "one arm that uses it is enough"
    assert change(Plan(arms=("baseline", "ngram2")), {"rounds": 2}).history == "verified"
