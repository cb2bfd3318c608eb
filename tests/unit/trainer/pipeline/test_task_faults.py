"""Faults of real ranks under --use-dpp: the detector names their culprit; `auto` fills waits for a late link."""

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import small_training
import traced_steps

from megatronapp_analyzer.detect.engine import Detector
from megatronapp_analyzer.model import Verdict
from megatronapp_common.trace import PASS_KINDS, RECORD, PassFlag

pytestmark = [pytest.mark.torch, pytest.mark.full("traced runs of 50 steps; test_task_orders judges simulated ones")]

RunRanks = Callable[..., list[Any]]
Rank = tuple[dict[str, Any], np.ndarray]
MICROBATCHES, FROM_STEP, STEPS = 8, 25, 50
LONG_STEPS = 90
"""Steps of a run in which `auto` compares its plans again, in step 65, and uses the best."""
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 "
    f"--global-batch-size {MICROBATCHES} --train-iters {STEPS} --lr 1e-3 --mock-data --vocab-size 120 "
    "--attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --trace --use-dpp"
)
PP2 = "--pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
PP4 = "--pipeline-model-parallel-size 4"


def train(flags: str, faults: str) -> tuple[dict[str, Any], bytes]:
    """Train on this rank. Returns metadata and records of its ring."""
    run = small_training.prepare(f"{MODEL} {flags} --faults={faults}")
    import megatronapp_native as native
    from megatronapp_trainer import scan
    from megatronapp_trainer.parallel.groups import destroy_groups
    from megatronapp_trainer.scan.run_context import RunContext
    from megatronapp_trainer.training.build import build_iterators, build_schedule
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    context = RunContext(
        config=run.config,
        layout=run.layout,
        device_name=run.device.name,
        chunks=run.state.chunks,
        num_microbatches=MICROBATCHES,
    )
    observer = scan.start(context)
    schedule = build_schedule(run, observer)
    Trainer(
        run, build_iterators(run.config, run.layout, 0), schedule, stop_request=StopRequest(), observer=observer
    ).train()
    schedule.close()
    observer.close()
    destroy_groups()
    ring = pathlib.Path(os.environ["MEGATRONAPP_SHM_DIR"]) / f"test.rank{run.layout.rank}.ring"
    reader = native.RingReader(str(ring))
    data, lost = reader.read(1_000_000)
    assert lost == 0
    return json.loads(reader.info().metadata), data


def traced(run_ranks: RunRanks, folder: pathlib.Path, world: int, flags: str, fault: dict[str, Any]) -> list[Rank]:
    """Return metadata and records by rank of a run whose fault begins in step FROM_STEP."""
    folder.mkdir()
    environment = {"MEGATRONAPP_SHM_DIR": str(folder), "MEGATRONAPP_SHM_PREFIX": "test"}
    faults = json.dumps([fault | {"fromStep": FROM_STEP, "steps": LONG_STEPS}], separators=(",", ":"))
    results = run_ranks(world, train, flags, faults, environment=environment)
    return [(metadata, np.frombuffer(data, RECORD)) for metadata, data in results]


def verdicts(ranks: list[Rank]) -> list[Verdict]:
    """Return all verdicts about a run."""
    detector = Detector(traced_steps.layout_of(ranks[0][0]))
    return [verdict for view in traced_steps.views(ranks) for verdict in detector.observe(view)]


def named(found: list[Verdict]) -> set[tuple[str, tuple[int, ...], str]]:
    return {(str(verdict.subject.type), verdict.subject.ranks, str(verdict.cause)) for verdict in found}


def under_fault(ranks: list[Rank]) -> list[np.ndarray]:
    """Return the records of each rank in the steps that the fault disturbs."""
    return [records[records["step"] >= FROM_STEP] for _, records in ranks]


def early_passes(ranks: list[Rank]) -> int:
    """Return how many passes ran before their turn while the fault acted."""
    passes = [int(kind) for kind in PASS_KINDS]
    return sum(
        int(np.count_nonzero(records[np.isin(records["kind"], passes)]["flags"] & PassFlag.EARLY))
        for records in under_fault(ranks)
    )


SLOW_RANKS = {"PP2-auto": (2, f"{PP2} --dpp-schedule auto", 1), "VPP2-auto": (2, f"{VPP2} --dpp-schedule auto", 0)}
SLOW_RANKS |= {"PP4-zero-bubble": (4, f"{PP4} --dpp-schedule zero-bubble", 2), "PP4-auto": (4, PP4, 1)}


@pytest.mark.parametrize("layout", SLOW_RANKS)
def test_a_slow_rank_is_named_by_its_passes(run_ranks: RunRanks, tmp_path: pathlib.Path, layout: str) -> None:
    world, flags, slow = SLOW_RANKS[layout]
    ranks = traced(run_ranks, tmp_path / "rings", world, flags, {"rank": slow, "kind": "compute", "factor": 4})
    assert named(verdicts(ranks)) == {("rank", (slow,), "compute")}
    for kind in PASS_KINDS:
        lengths = [float(np.median(records[records["kind"] == kind]["duration"])) for records in under_fault(ranks)]
        assert np.argmax(lengths) == slow, kind.name


LATE = {"rank": 1, "kind": "link", "factor": 16, "peer": 0}


def test_a_late_link_is_named_and_auto_runs_passes_early(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    flags = f"{PP2} --train-iters {LONG_STEPS}"
    static = traced(run_ranks, tmp_path / "static", 2, f"{flags} --dpp-schedule static", LATE)
    auto = traced(run_ranks, tmp_path / "auto", 2, f"{flags} --dpp-schedule auto --dpp-memory-cap {MICROBATCHES}", LATE)
    assert named(verdicts(static)) == named(verdicts(auto)) == {("link", (0, 1), "link")}
    assert early_passes(static) == 0
    assert early_passes(auto) > 0
