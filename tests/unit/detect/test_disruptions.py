"""Verdicts while records are lost, torn or moved, as bench/detect_disruptions.py counts them."""

import itertools

import detect_disruptions
import numpy as np
import pytest
from detect.protocol import NamedSubject, Verdict
from detect_disruptions import BEGIN, DISRUPTIONS, END, STEPS, DisturbedCase, drawn, run, table


def disturbed_case(disruption: str, kind: str = "compute", layout: str = "dp4-pp2") -> DisturbedCase:
    return DisturbedCase(disruption=disruption, layout=layout, kind=kind, seed=3)


@pytest.mark.parametrize(
    "disruption",
    ["hole of 40 steps, its node", "clock jumps by +50 ms", "new attempt", "steps cut off", "real clock set by -1 h"],
)
def test_the_verdict_is_right_or_unknown(disruption: str) -> None:
    outcome = run(disturbed_case(disruption))
    assert outcome.result in {"right", "unknown"}, outcome.notes


@pytest.mark.parametrize(("jump", "layout"), [("-3000 ms", "dp4-pp2"), ("+5 ms", "dp4-pp4-vpp2")])
def test_nothing_is_named_in_a_healthy_job_whose_clock_jumps(jump: str, layout: str) -> None:
    outcome = run(disturbed_case(f"clock jumps by {jump}", "healthy", layout))
    assert (outcome.result, outcome.to_the_end) == ("right", False), outcome.notes


def test_every_disruption_begins_on_time_and_counts_what_is_lost() -> None:
    """Records before the disruption are those of the job; what is lost is counted."""
    plain = list(drawn(disturbed_case("none"))[0].traces())
    for name, disruption in DISRUPTIONS.items():
        disturbed, _ = drawn(disturbed_case(name))
        traces = list(disruption.play(disturbed))
        if disruption.fault_begin > BEGIN or name == "none":
            continue
        for before, now in zip(plain[:BEGIN], traces[:BEGIN], strict=True):
            assert before.records.tobytes() == now.records.tobytes(), name
        after = [trace for trace in traces[BEGIN:] if trace.step < END]
        expected = plain[BEGIN:END]
        changed = len(after) != len(expected) or any(
            before.records.tobytes() != now.records.tobytes() or before.real_time_s != now.real_time_s
            for before, now in zip(expected, after, strict=True)
        )
        assert changed, name
        for before, now in itertools.zip_longest(expected, after):
            if now is not None and now.attempt == 0 and len(now.records) < len(before.records):
                assert now.lost == len(before.records) - len(now.records)


def test_another_attempt_repeats_steps_later() -> None:
    traces = list(DISRUPTIONS["new attempt"].play(drawn(disturbed_case("new attempt"))[0]))
    assert [(trace.attempt, trace.step) for trace in traces[BEGIN - 1 : BEGIN + 1]] == [(0, BEGIN - 1), (1, BEGIN - 15)]
    assert traces[-1].step == STEPS - 1
    assert all((trace.records["step"] == trace.step).all() for trace in traces)
    starts = [int(trace.records["start_ns"].min()) for trace in traces]
    assert (np.diff(starts) > 0).all()
    assert traces[BEGIN].real_time_s > traces[BEGIN - 1].real_time_s + 60


def test_a_healthy_subject_or_a_failure_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    class NamingDetector:
        verdicts: tuple[Verdict, ...] = (Verdict(subject=NamedSubject((0,)), cause="compute"),)

        def __init__(self, grid: object) -> None: ...

        def step(self, trace: object) -> tuple[Verdict, ...]:
            return self.verdicts

    class FailingDetector(NamingDetector):
        def step(self, trace: object) -> tuple[Verdict, ...]:
            raise IndexError("no such rank")

    class SilentDetector(NamingDetector):
        verdicts = ()

    outcomes = []
    for detector, kind in itertools.product((NamingDetector, FailingDetector, SilentDetector), ("compute", "healthy")):
        monkeypatch.setattr(detect_disruptions, "CurrentDetector", detector)
        outcomes.append(run(disturbed_case("none", kind)))
    assert [each.result for each in outcomes] == ["wrong"] * 4 + ["unknown", "right"]
    assert "IndexError: no such rank" in outcomes[2].notes[0]
    assert table(outcomes).splitlines()[-1] == "| all | 3 | 0, 0 | 1 | 2 | 3 | 2 |"
