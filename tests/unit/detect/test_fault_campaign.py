"""Campaigns of real faults: rows of what was named, and the cores of ranks."""

import argparse
import itertools
import os
import subprocess
import sys
from typing import Any

import httpx
import pytest
from cpu_faults import assign, disturbances, parse_cores
from fault_campaign import (
    Disturbance,
    FaultCampaign,
    Named,
    ProcessDisturber,
    collecting_environment,
    is_right,
    table,
)
from rank_garbage.sitecustomize import FIRST_OBJECTS, LEAST_S


def verdict(ranks: list[int], cause: str, since: int, cost_s: float = 0.1) -> Named:
    found = {
        "subject": {"type": "rank", "ranks": ranks},
        "cause": cause,
        "since": {"step": since},
        "sentence": f"{ranks} {cause}",
    }
    return Named(seen_at=since + 4, verdict=found | {"effect": {"secondsPerStep": cost_s}})


def judged(
    *found: Named, slow_s: float = 0.3, subjects: tuple[tuple[int, ...], ...] = ((2, 3),)
) -> list[dict[str, Any]]:
    """Return the rows of a disturbance in steps 50 to 80, whose steps take `slow_s` in place of 0.2 s."""
    steps = [{"step": step, "durationNs": 1e9 * (slow_s if 50 <= step < 80 else 0.2)} for step in range(120)]
    answers = httpx.MockTransport(lambda _request: httpx.Response(200, json=steps))
    with httpx.Client(transport=answers, base_url="http://hub") as hub:
        campaign = FaultCampaign(hub, ProcessDisturber())
        campaign.named = {str(number): each for number, each in enumerate(found)}
        stopped = Disturbance[ProcessDisturber](
            name="stopped", start=lambda _disturber: None, cause="host", subjects=subjects, begin=50, end=80
        )
        return campaign.judge([stopped], least=0.15)


def test_a_worker_that_is_named_as_a_whole_is_right() -> None:
    row, healthy = rows = judged(verdict([2, 3], "host", 52, 0.09))
    assert (row["ratio"], row["cost_s"], row["estimate_s"]) == pytest.approx((1.5, 0.1, 0.09))
    assert (row["delay"], row["matters"], row["others"], healthy["others"]) == (6, True, [], [])
    assert is_right(rows)
    assert "| stopped | [[2, 3]], host | 0.200 | 1.500 | 0.100 | 0.090 | 6 | [2, 3] host |" in table(rows)


def test_a_part_of_a_worker_is_neither_right_nor_wrong() -> None:
    row, _ = rows = judged(verdict([3], "host", 52))
    assert ("delay" in row, row["parts"], row["others"]) == (False, ["[3] host"], [])
    assert not is_right(rows)
    assert is_right(judged(verdict([3], "host", 52), slow_s=0.21))


def test_a_group_with_the_rank_among_it_is_neither_right_nor_wrong() -> None:
    row, _ = rows = judged(verdict([2, 3], "host", 52), subjects=((2,),))
    assert ("delay" in row, row["parts"], row["others"]) == (False, ["[2, 3] host"], [])
    assert not is_right(rows)
    both = judged(verdict([2, 3], "host", 52), verdict([2], "host", 52), subjects=((2,),))
    assert is_right(both)


def test_a_verdict_that_grows_counts_by_its_cost_in_the_disturbance() -> None:
    early = verdict([2, 3], "host", 41, 0.002)
    early.costs_s |= {46: 0.002, 60: 0.08, 75: 0.1, 90: 0.002}
    row, healthy = rows = judged(early)
    assert (row["estimate_s"], row["delay"]) == (0.1, "before it")
    assert healthy["others"] == ["[2, 3] host"]
    assert not is_right(rows)
    early.costs_s |= {60: 0.002, 75: 0.003}
    assert "delay" not in judged(early)[0]


@pytest.mark.parametrize("wrong", [verdict([2, 3], "compute", 52), verdict([1], "host", 60), verdict([2], "host", 30)])
def test_another_cause_subject_or_time_is_wrong(wrong: Named) -> None:
    assert not is_right(judged(verdict([2, 3], "host", 52), wrong))


def test_both_of_two_subjects_must_be_named() -> None:
    both = verdict([0], "host", 52, 0.04), verdict([3], "host", 55, 0.05)
    row, _ = judged(*both, subjects=((0,), (3,)))
    assert (row["delay"], row["estimate_s"]) == (9, pytest.approx(0.09))
    assert "delay" not in judged(both[0], subjects=((0,), (3,)))[0]


def test_layouts_that_run_at_once_have_separate_cores() -> None:
    plans, others, at_once = assign(["pp4", "pp2-dp2", "tp2-dp2"], range(16))
    assert at_once
    assert sorted(core for plan in plans for core in plan.cores) == list(range(12))
    assert others == {12, 13, 14, 15}
    plans, others, at_once = assign(["pp4", "pp2-dp2"], range(8))
    assert not at_once
    assert [plan.cores for plan in plans] == [(0, 1, 2, 3)] * 2
    assert others == {4, 5, 6, 7}
    assert assign(["pp2"], [0])[1] == {0}


def test_disturbances_name_ranks_of_the_job_and_do_not_overlap() -> None:
    for world in (2, 4):
        planned = disturbances(world)
        assert all(rank < world for each in planned for subject in each.subjects for rank in subject)
        assert all(before.end < after.begin for before, after in itertools.pairwise(planned))


def test_cores_are_read_from_ranges() -> None:
    here = min(os.sched_getaffinity(0))
    assert parse_cores(f"{here}-{here},{here}") == [here, here]
    with pytest.raises(argparse.ArgumentTypeError, match=r"may not use the cores \[100000\]"):
        parse_cores("100000")


STEPS = """
import gc, time
began = longest = 0.0
def notice(phase, info):
    global began, longest
    if phase == "start":
        began = time.perf_counter()
    elif info["generation"] == 2:
        longest = max(longest, time.perf_counter() - began)
gc.callbacks.append(notice)
while True:
    time.sleep(0.01)
    print(longest, len(gc.get_objects()), flush=True)
"""
"""A program of steps, which prints its longest collection of all objects so far, in seconds, and how many it has."""


def test_a_rank_collects_a_large_heap_until_the_disturbance_ends() -> None:
    variable = collecting_environment()
    environment = os.environ | {"LOCAL_RANK": "0", variable["name"]: variable["value"]}
    disturber = ProcessDisturber()
    with subprocess.Popen([sys.executable, "-c", STEPS], env=environment, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        steps = (line.split() for line in rank.stdout)
        assert int(next(steps)[1]) < FIRST_OBJECTS
        disturber.collect(rank.pid, 0.01)
        assert any(float(longest_s) >= LEAST_S and int(objects) >= FIRST_OBJECTS for longest_s, objects in steps)
        disturber.calm()
        assert any(int(objects) < FIRST_OBJECTS for _, objects in steps)
        rank.kill()
