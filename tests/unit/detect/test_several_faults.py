"""Several faults of one node are several subjects, and a node whose ranks are all slow is one."""

import pytest
from detect.faults import parse
from detect.noise import GPU
from detect.protocol import NamedSubject
from detect.runner import run
from detect.simulation import SimulatedJob
from detect.suite import LAYOUTS, DetectionCase

CASES = {
    "three units alike, one healthy": ("; ".join(f"compute rank={rank} factor=1.5 from=14" for rank in (9, 11, 13)), 3),
    "the node": ("compute node=1 factor=1.1 from=14", 1),
}


@pytest.mark.parametrize("case", CASES)
def test_a_node_is_named_for_what_all_its_ranks_have_in_common(case: str) -> None:
    text, subjects = CASES[case]
    grid = LAYOUTS["dp4-pp2-tp2"]
    faults = parse(text, grid)
    job = SimulatedJob(grid=grid, noise=GPU, microbatches=8, faults=faults)
    outcome = run(
        DetectionCase(row="several", layout="dp4-pp2-tp2", job=job, seed=3, steps=32, faults=faults), ["ours"]
    )
    named = {verdict.subject for verdicts in outcome.windows["ours"].named.values() for verdict in verdicts}
    assert named == {NamedSubject(fault.ranks) for fault in faults}
    assert len(named) == subjects
