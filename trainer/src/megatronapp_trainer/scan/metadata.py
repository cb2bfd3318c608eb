"""Metadata of a ring: the rank's place in the layout, and the table of its communicators."""

import dataclasses
import json
import os
import socket
from collections.abc import Iterable, Mapping
from typing import Any

from megatronapp_common.names import Env
from megatronapp_common.pid_namespace import pid_namespace
from megatronapp_common.trace import RecordKind
from megatronapp_trainer.parallel.layout import Layout
from megatronapp_trainer.scan.run_context import RunContext

GROUP_OF_KIND = {
    RecordKind.GRAD_REDUCE: "dp",
    RecordKind.PARAM_GATHER: "dp",
    RecordKind.LOSS_REDUCE: "dp",
    RecordKind.EMBED_REDUCE: "embed",
    RecordKind.GRAD_NORM: "mp",
}
"""Group whose members meet in a span of this kind."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """A slot of the table. A p2p communicator is directed: members are source and destination."""

    slot: int
    kind: str
    members: tuple[int, ...]
    """The launcher's numbers of ranks."""


def directed_pairs(layout: Layout) -> list[tuple[int, int]]:
    """Return the pairs (source, destination) between this rank and its neighbours in the pipeline's ring, each once."""
    if layout.pipeline_size == 1:
        return []
    stride = layout.tensor_size * layout.context_size * layout.data_size
    stage, size = layout.pipeline_rank, layout.pipeline_size
    around = [layout.rank + ((stage + way) % size - stage) * stride for way in (-1, 1)]
    pairs = [pair for peer in around for pair in ((peer, layout.rank), (layout.rank, peer))]
    return list(dict.fromkeys(pairs))


def communicators(layout: Layout, groups: Mapping[str, Iterable[int]]) -> list[Communicator]:
    """Return the table: directed pairs first, then the groups that have more than one member.

    Members have the launcher's numbers; `groups` have ranks of this rank's role.
    """
    pairs = [tuple(layout.global_rank_of(rank) for rank in pair) for pair in directed_pairs(layout)]
    members: list[tuple[str, tuple[int, ...]]] = [("p2p", pair) for pair in pairs + _partner_pairs(layout)]
    members += [(kind, tuple(layout.global_rank_of(rank) for rank in ranks)) for kind, ranks in groups.items()]
    shared = [(kind, ranks) for kind, ranks in members if len(ranks) > 1]
    return [Communicator(slot=slot, kind=kind, members=ranks) for slot, (kind, ranks) in enumerate(shared)]


def _partner_pairs(layout: Layout) -> list[tuple[int, ...]]:
    """Return the pairs of the launcher's numbers between this rank and its partners of the other role, both ways."""
    if layout.fbd is None:
        return []
    own = layout.global_rank
    return [pair for partner in layout.fbd.partners(own) for pair in ((partner, own), (own, partner))]


def ring_metadata(context: RunContext, table: Iterable[Communicator], record_cost_ns: float | None) -> bytes:
    """Return the JSON of a rank's ring; see docs/contracts.md section 4.

    `record_cost_ns` is the measured cost of a record, None if it could not be measured.
    """
    layout, config = context.layout, context.config
    document: dict[str, Any] = {
        "rank": layout.global_rank,
        "localRank": layout.local_rank,
        "worker": int(os.environ.get(Env.WORKER_INDEX, "0")),
        "node": os.environ.get(Env.NODE_NAME) or socket.gethostname(),
        "address": os.environ.get(Env.ADDRESS, ""),
        "pid": os.getpid(),
        "pidNamespace": pid_namespace(),
        "world": layout.global_world_size,
        "layout": {
            "tensor": layout.tensor_size,
            "pipeline": layout.pipeline_size,
            "virtualPipeline": layout.virtual_size,
            "data": layout.data_size,
            "context": layout.context_size,
            "expert": layout.expert_size,
            **({"vee": 1} if layout.is_vee else {}),
        },
        "coordinates": {
            "tp": layout.tensor_rank,
            "cp": layout.context_rank,
            "ep": layout.expert_rank,
            "dp": layout.data_rank,
            "pp": layout.pipeline_rank,
        },
        "comms": [dataclasses.asdict(communicator) for communicator in table],
        "device": context.device_name,
        "totalIterations": config.training.train_iters,
        "numMicrobatches": context.num_microbatches,
        "recordCostNs": record_cost_ns,
        **_role(layout),
    }
    return json.dumps(document, separators=(",", ":")).encode()


def _role(layout: Layout) -> dict[str, Any]:
    """Return the role of this rank, and what numbers the ranks of both; empty without roles."""
    world = layout.fbd
    if world is None:
        return {}
    return {
        "role": layout.role.value,
        "fbd": {
            "tensor": world.trained.tensor,
            "data": world.trained.data,
            "merged": world.merged,
            "backwardPerForward": world.backward_per_forward,
            "apart": world.apart,
        },
    }
