"""Several faults of one node are several subjects, and a node whose ranks are all slow is one."""

import pytest
from detect.faults import parse
from detect.noise import GPU
from detect.protocol import NamedSubject
from detect.runner import run
from detect.simulation import JobSimulation, SimulatedJob
from detect.suite import LAYOUTS, DetectionCase

from megatronapp_analyzer.detect.units import lateness
from megatronapp_analyzer.model import StepRecords
from megatronapp_common.trace import RecordKind

MEETINGS = 8
"""Times at which the members of a unit meet inside a pass."""

CASES = {
    "three units alike, one healthy": (
        "dp4-pp2-tp2",
        "; ".join(f"compute rank={rank} factor=1.5 from=14" for rank in (9, 11, 13)),
    ),
    "the node": ("dp4-pp2-tp2", "compute node=1 factor=1.1 from=14"),
    "two devices alike, one after the other": (
        "dp2-pp4",
        "compute rank=6 factor=1.4 from=14; compute rank=7 factor=1.4 from=19",
    ),
    "two hosts alike, one after the other": ("dp2-pp4", "host rank=0 stall=1.5 from=14; host rank=1 stall=1.5 from=22"),
    "two devices alike, two steps apart": (
        "dp2-pp4",
        "compute rank=6 factor=1.4 from=14; compute rank=7 factor=1.4 from=16",
    ),
    "two devices unlike at once": ("dp2-pp4", "compute rank=4 factor=1.2 from=15; compute rank=5 factor=1.6 from=14"),
    "two hosts alike, two steps apart": ("dp2-pp4", "host rank=6 stall=1.1 from=14; host rank=7 stall=1.1 from=16"),
    "a node of two": ("dp2-pp4", "compute node=3 factor=1.1 from=14"),
    "the hosts of a node of two": ("dp2-pp4", "host node=3 stall=1.1 from=14"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_node_is_named_for_what_all_its_ranks_have_in_common(case: str) -> None:
    layout, text = CASES[case]
    grid = LAYOUTS[layout]
    faults = parse(text, grid)
    job = SimulatedJob(grid=grid, noise=GPU, microbatches=8, faults=faults)
    outcome = run(DetectionCase(row="several", layout=layout, job=job, seed=3, steps=36, faults=faults), ["ours"])
    named = {verdict.subject for verdicts in outcome.windows["ours"].named.values() for verdict in verdicts}
    assert named == {NamedSubject(fault.ranks) for fault in faults}


def test_lateness_does_not_depend_on_which_spans_are_lost() -> None:
    grid = LAYOUTS["dp4-pp2-tp2"]
    job = SimulatedJob(grid=grid, noise=GPU, microbatches=8, faults=parse("compute rank=3 factor=1.4 from=0", grid))
    *_, trace = JobSimulation(job, 3, 2).traces()
    found = []
    for rare in (RecordKind.FORWARD, RecordKind.BACKWARD):
        left = trace.records[(trace.records["kind"] != rare) | (trace.records["microbatch"] == 0)]
        found.append(lateness(StepRecords(attempt=0, step=1, records=left, comms={}), (2, 3)))
    late = 0.4 / 1.4 / MEETINGS
    for values in found:
        assert values == pytest.approx([0.0, late], abs=0.1 * late)


def test_the_member_at_fault_is_named_where_records_are_lost() -> None:
    grid = LAYOUTS["dp4-pp2-tp2"]
    faults = parse("compute rank=3 factor=1.4 from=14", grid)
    job = SimulatedJob(grid=grid, noise=GPU, microbatches=8, faults=faults, lost_fraction=0.2)
    outcome = run(DetectionCase(row="lost", layout="", job=job, seed=3, steps=30, faults=faults), ["ours"])
    named = {verdict.subject for verdicts in outcome.windows["ours"].named.values() for verdict in verdicts}
    assert named == {NamedSubject((3,))}
