"""Faults of forward and backward ranks: the detector names the rank or the link that is slow."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import traced_steps
from fbd_tracing import traced

from megatronapp_analyzer.detect.engine import Detector
from megatronapp_analyzer.model import Verdict

pytestmark = [pytest.mark.torch]

RunRanks = Callable[..., list[Any]]
FROM_STEP, STEPS = 20, 40
MODEL = f"--train-iters {STEPS} --hidden-size 64 --seq-length 64 --global-batch-size 8"
PP2 = "--pipeline-model-parallel-size 2"
VPP2_AUTO = f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --use-dpp"


def verdicts(run_ranks: RunRanks, world: int, flags: str, folder: pathlib.Path, fault: dict[str, Any]) -> list[Verdict]:
    faults = json.dumps([fault | {"fromStep": FROM_STEP, "steps": STEPS}], separators=(",", ":"))
    ranks = traced(run_ranks, world, f"{MODEL} {flags} --faults={faults}", folder)
    detector = Detector(traced_steps.layout_with_roles([metadata for metadata, _ in ranks]))
    return [verdict for view in traced_steps.views(ranks) for verdict in detector.observe(view)]


@pytest.mark.full("traced runs of 40 steps; the detector's own tests have simulated runs of both roles")
@pytest.mark.parametrize(
    ("flags", "rank", "name"),
    [
        ("", 1, "Forward rank 1 (stage 0"),
        ("", 0, "Backward rank 0 (stage 0"),
        (PP2, 3, "Forward rank 3 (stage 1"),
        (PP2, 0, "Backward rank 0 (stage 0"),
        (VPP2_AUTO, 3, "Forward rank 3 (stage 1"),
        (VPP2_AUTO, 0, "Backward rank 0 (stage 0"),
    ],
    ids=["forward", "backward", "PP2-forward", "PP2-backward", "VPP2-auto-forward", "VPP2-auto-backward"],
)
def test_a_slow_rank_of_each_role_is_named(
    run_ranks: RunRanks, tmp_path: pathlib.Path, flags: str, rank: int, name: str
) -> None:
    world = 4 if flags else 2
    found = verdicts(run_ranks, world, flags, tmp_path, {"rank": rank, "kind": "compute", "factor": 3})
    assert {(verdict.subject.ranks, str(verdict.cause)) for verdict in found} == {((rank,), "compute")}
    assert found[0].sentence.startswith(f"{name}, replica 0, ")
