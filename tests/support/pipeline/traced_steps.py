"""Steps as the detector takes them, from the rings of ranks that a test has run."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megatronapp_analyzer.model import RANK_RECORD, Communicator, JobLayout, StepRecords
from megatronapp_common.topology import Coordinates, RankRole


def views(ranks: Sequence[tuple[dict[str, Any], np.ndarray]]) -> Iterator[StepRecords]:
    """Yield the steps of ranks, given as metadata and records of each ring; all rings are whole."""
    comms = {
        rank: {comm["slot"]: Communicator(comm["kind"], tuple(comm["members"])) for comm in metadata["comms"]}
        for rank, (metadata, _) in enumerate(ranks)
    }
    parts = []
    for rank, (_, records) in enumerate(ranks):
        part = np.zeros(len(records), RANK_RECORD)
        for name in records.dtype.names or ():
            part[name] = records[name]
        part["rank"] = rank
        parts.append(part)
    records = np.concatenate(parts)
    records = records[np.lexsort((records["start_ns"], records["rank"]))]
    for step in np.unique(records["step"]):
        yield StepRecords(attempt=0, step=int(step), records=records[records["step"] == step], comms=comms)


def layout_of(metadata: dict[str, Any]) -> JobLayout:
    """Return the layout that a ring names; all ranks on one node."""
    sizes = metadata["layout"]
    return JobLayout.grid(tp=sizes["tensor"], pp=sizes["pipeline"], vpp=sizes["virtualPipeline"], dp=sizes["data"])


def layout_with_roles(metadata: Sequence[dict[str, Any]]) -> JobLayout:
    """Return the layout that the rings of forward and backward ranks name; all ranks on one node."""
    (sizes, *_) = [ring["layout"] for ring in metadata if ring["role"] == RankRole.BACKWARD]
    return JobLayout(
        tp=sizes["tensor"],
        pp=sizes["pipeline"],
        vpp=sizes["virtualPipeline"],
        dp=sizes["data"],
        coordinates=tuple(Coordinates(**ring["coordinates"]) for ring in metadata),
        workers=(0,) * len(metadata),
        nodes=("node-0",) * len(metadata),
        roles=tuple(RankRole(ring["role"]) for ring in metadata),
    )
