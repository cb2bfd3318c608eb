"""Traces of forward and backward ranks: each pass once, on the rank of its role, and messages of both ends matched."""

import pathlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import traced_steps
from fbd_tracing import MICROBATCHES, STEPS, traced

from megatronapp_analyzer.hub.ingest.digest import StepDigest
from megatronapp_analyzer.hub.ingest.pipeline_passes import transfers_of
from megatronapp_analyzer.hub.ingest.role_passes import ranks_of, role_passes, shipments
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_common.topology import RankRole
from megatronapp_common.trace import RecordKind

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]
PP2 = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
EIGHT = "--global-batch-size 8"


@pytest.mark.full("the others have all that a pair has; with MegaDPP", but=("VPP2", "one-forward-for-two"))
@pytest.mark.parametrize(
    ("world", "flags", "replicas"),
    [
        (2, "", 1),
        (4, PP2, 1),
        (4, f"{PP2} --use-dpp", 1),
        (3, f"{EIGHT} --fbd-backward-per-forward 2", 2),
        (6, f"{PP2} {EIGHT} --fbd-backward-per-forward 2 --use-dpp", 2),
    ],
    ids=["pair", "VPP2", "VPP2-auto", "one-forward-for-two", "one-forward-for-two-auto"],
)
def test_passes_and_messages_are_recorded_once(
    run_ranks: RunRanks, tmp_path: pathlib.Path, world: int, flags: str, replicas: int
) -> None:
    ranks = traced(run_ranks, world, flags, tmp_path)
    chunks = 2 if "virtual" in flags else 1
    splits = "pipeline" in flags
    assert Counter(metadata["role"] for metadata, _ in ranks) == {
        "forward": world // (replicas + 1),
        "backward": world - world // (replicas + 1),
    }
    posted: Counter[tuple[Any, ...]] = Counter()
    copied: Counter[tuple[Any, ...]] = Counter()
    for metadata, records in ranks:
        is_forward = metadata["role"] == "forward"
        own, other = (
            (RecordKind.FORWARD, RecordKind.BACKWARD) if is_forward else (RecordKind.BACKWARD, RecordKind.FORWARD)
        )
        for step in range(STEPS):
            of_step = records[records["step"] == step]
            passes = of_step[of_step["kind"] == own]
            count = MICROBATCHES * (replicas if is_forward else 1)
            expected = {(chunk, microbatch) for chunk in range(chunks) for microbatch in range(count)}
            assert len(passes) == len(expected)
            assert set(zip(passes["chunk"].tolist(), passes["microbatch"].tolist(), strict=True)) == expected
            assert not (of_step["kind"] == other).any()
            weights = of_step[of_step["kind"] == RecordKind.WEIGHT]
            assert len(weights) == (0 if is_forward or not splits else len(expected))
            assert (of_step["kind"] == RecordKind.STEP).sum() == 1
        members = {comm["slot"]: tuple(comm["members"]) for comm in metadata["comms"]}
        for kind, found in ((RecordKind.SEND_POST, posted), (RecordKind.COPY, copied)):
            messages = records[records["kind"] == kind]
            assert all(metadata["rank"] in members[slot] for slot in messages["comm"].tolist())
            found.update(
                (members[slot], step, ordinal)
                for slot, step, ordinal in zip(
                    messages["comm"].tolist(), messages["step"].tolist(), messages["ordinal"].tolist(), strict=True
                )
            )
    assert posted.keys() == copied.keys()
    assert set(posted.values()) == {1}
    roles = [metadata["role"] for metadata, _ in ranks]
    shipped = {
        key: count for key, count in copied.items() if [roles[rank] for rank in key[0]] == ["forward", "backward"]
    }
    assert all(copied[key] == 1 for key in copied.keys() - shipped.keys())
    assert max(shipped.values()) > 1, "the layers of a pass leave apart"
    check_figures(ranks)


def check_figures(ranks: list[tuple[Any, np.ndarray]]) -> None:
    """Check what the hub says about both roles: each rank is busy, and each step ships the same bytes to each pair."""
    layout = traced_steps.layout_with_roles([metadata for metadata, _ in ranks])
    shipped = set()
    for view in traced_steps.views(ranks):
        values = np.zeros((4, layout.world), "f4")
        digest = StepDigest(attempt=0, step=view.step, start_real_ns=0, duration_ns=0, complete=True, values=values)
        step = StoredStep(view=view, digest=digest, offsets_ns=np.zeros(layout.world, np.int64))
        figures = role_passes(step, layout)
        assert figures is not None
        assert ((figures.busy > 0) & (figures.busy <= 1) & (figures.pass_seconds > 0)).all()
        assert (figures.wait_seconds >= 0).all()
        pairs = shipments(transfers_of(step), layout)
        assert sorted(pair.destination for pair in pairs) == ranks_of(RankRole.BACKWARD, layout).tolist()
        shipped.add(tuple((pair.source, pair.destination, pair.count, pair.size_bytes) for pair in pairs))
    assert len(shipped) == 1
    assert all(size_bytes > MICROBATCHES * 16 * 32 * 4 for *_, size_bytes in shipped.pop()), "at least hidden states"
