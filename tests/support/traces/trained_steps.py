"""Steps of the simulator as ranks of a training record them: all reduce the loss together, in the replicas' slot."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from megatronapp_analyzer.model import Communicator, JobLayout, StepRecords
from megatronapp_common.trace import NO_COMM, RecordKind

Tables = Mapping[int, Mapping[int, Communicator]]


def as_trained(view: StepRecords, layout: JobLayout) -> StepRecords:
    """Return a step whose gradient norm, in which all ranks meet, is the reduction of the loss.

    No table lists all ranks, nor a group of one; groups of the model take the slot of the world.
    """
    comms = trained_tables(view.comms, layout)
    data = {rank: [slot for slot, comm in table.items() if comm.kind == "dp"] for rank, table in comms.items()}
    records = view.records.copy()
    losses = np.flatnonzero(records["kind"] == RecordKind.GRAD_NORM)
    records["kind"][losses] = RecordKind.LOSS_REDUCE
    records["comm"][losses] = [(data[rank] or [NO_COMM])[0] for rank in records["rank"][losses].tolist()]
    return dataclasses.replace(view, records=records, comms=comms)


def trained_tables(comms: Tables, layout: JobLayout) -> dict[int, dict[int, Communicator]]:
    """Return tables as ranks of a training have them, from those of the simulator."""
    tables: dict[int, dict[int, Communicator]] = {}
    for rank, table in comms.items():
        at = layout.coordinates[rank]
        ranks = [other for other, place in enumerate(layout.coordinates) if (place.dp, place.cp) == (at.dp, at.cp)]
        model = Communicator("mp", tuple(ranks))
        own = {slot: model if comm.kind == "world" else comm for slot, comm in table.items()}
        tables[rank] = {slot: comm for slot, comm in own.items() if len(comm.members) > 1}
    return tables
