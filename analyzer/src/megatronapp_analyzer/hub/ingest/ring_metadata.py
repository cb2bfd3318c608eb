"""Metadata of rings as agents report it: writer, communicators and clock of each ring."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.model import Communicator, JobLayout
from megatronapp_common.errors import TopologyError
from megatronapp_common.topology import Coordinates, RankRole, Topology

COORDINATES = ("tp", "cp", "ep", "dp", "pp")
MAX_WORLD = 65536
GPU_NAME = re.compile(r"cuda\b(?::(\d+))?")
NOWHERE = -1
"""Worker of a rank that has not reported."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankRing:
    """Metadata of the ring of one rank in one attempt."""

    attempt: int
    rank: int
    local_rank: int
    worker: int
    node: str
    world: int
    role: RankRole
    """Passes of the rank; FORWARD and BACKWARD with MegaFBD."""
    layout: Mapping[str, int]
    coordinates: Coordinates
    comms: Mapping[int, Communicator]
    device: str
    boot_id: str
    real_offset_ns: int
    """Real time minus the monotonic clock of the rank's node."""
    total_iterations: int | None = None
    record_cost_ns: float | None = None
    """Cost of a record for the rank, as it measured when it began; None if it did not report it."""

    @property
    def gpu(self) -> int | None:
        """Index of the rank's GPU among those of its worker, the local rank for a GPU without index; None on a CPU."""
        found = GPU_NAME.match(self.device)
        if found is None:
            return None
        return self.local_rank if found[1] is None else int(found[1])


def real_offset_ns(pairs: Sequence[Sequence[int]]) -> int:
    """Return real time minus monotonic time of the newest of (monotonic, real) pairs; 0 without any."""
    return int(pairs[-1][1]) - int(pairs[-1][0]) if pairs else 0


def _count(told: Any) -> int | None:  # noqa: ANN401 - JSON of another process
    """Return a number of steps above 0; None for a job that only loads and ends."""
    return int(told) or None if told is not None else None


def _cost_ns(told: float | None) -> float | None:
    return None if told is None else float(told)


def _comms(table: Iterable[Mapping[str, Any]]) -> dict[int, Communicator]:
    return {
        int(entry["slot"]): Communicator(str(entry["kind"]), tuple(int(member) for member in entry["members"]))
        for entry in table
    }


def parse_ring(attempt: int, header: Mapping[str, Any]) -> RankRing:
    """Return the ring that a RING frame describes. Raises ProtocolError if the header lacks or garbles a field."""
    try:
        metadata = header["metadata"]
        ring = RankRing(
            attempt=attempt,
            rank=int(header["rank"]),
            local_rank=int(metadata["localRank"]),
            worker=int(header["worker"]),
            node=str(metadata["node"]),
            world=int(metadata["world"]),
            role=RankRole(str(metadata.get("role", RankRole.ALL))),
            layout={str(name): int(size or 1) for name, size in metadata["layout"].items()},
            coordinates=Coordinates(**{name: int(metadata["coordinates"][name]) for name in COORDINATES}),
            comms=_comms(metadata["comms"]),
            device=str(metadata.get("device", "cpu")),
            boot_id=str(header["bootId"]),
            real_offset_ns=real_offset_ns(header["clockPairs"]),
            total_iterations=_count(metadata.get("totalIterations")),
            record_cost_ns=_cost_ns(metadata.get("recordCostNs")),
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError("bad-ring", f"RING frame: {type(error).__name__}: {error}") from error
    if not 0 <= ring.rank < ring.world <= MAX_WORLD:
        raise ProtocolError("bad-ring", f"RING frame: rank {ring.rank} of a world of {ring.world}")
    return ring


def device_count(rings: Mapping[int, RankRing]) -> int:
    """Return the number of GPUs that the ranks use, or of ranks where none uses a GPU; 0 without rings.

    Ranks without a ring are taken to share GPUs, or to use none, like the others.
    """
    if not rings:
        return 0
    world = next(iter(rings.values())).world
    gpus = {(ring.worker, gpu) for ring in rings.values() if (gpu := ring.gpu) is not None}
    return round(world * len(gpus) / len(rings)) if gpus else world


def build_layout(rings: Mapping[int, RankRing], *, partial: bool = False) -> JobLayout | None:
    """Return the layout of the job once every rank's ring is known; None before. Raises LayoutError if rings disagree.

    `partial`: also with rings missing. Where those ranks run is not known (worker -1, node ""); what they do follows
    from their number, in the usual order of ranks. None if the known ranks are in another order.
    """
    if not rings:
        return None
    # Sizes of backward ranks are those of the training.
    first = max(rings.values(), key=lambda ring: ring.role is RankRole.BACKWARD)
    sizes, ranks = first.layout, range(first.world)
    places = {rank: ring.coordinates for rank, ring in rings.items()}
    if len(rings) < first.world:
        usual = _usual_places(first) if first.role is RankRole.ALL else {}
        if not partial or any(usual.get(rank) != place for rank, place in places.items()):
            return None
        places = usual
    return JobLayout(
        tp=sizes.get("tensor", 1),
        pp=sizes.get("pipeline", 1),
        vpp=sizes.get("virtualPipeline", 1),
        dp=sizes.get("data", 1),
        cp=sizes.get("context", 1),
        ep=sizes.get("expert", 1),
        coordinates=tuple(places[rank] for rank in ranks),
        workers=tuple(rings[rank].worker if rank in rings else NOWHERE for rank in ranks),
        nodes=tuple(rings[rank].node if rank in rings else "" for rank in ranks),
        is_vee=sizes.get("vee", 0) == 1,
        roles=() if first.role is RankRole.ALL else tuple(rings[rank].role for rank in ranks),
        devices=device_count(rings),
    )


def _usual_places(ring: RankRing) -> dict[int, Coordinates]:
    """Return the coordinates of each rank in Megatron's default order; empty if the sizes do not make up the world."""
    sizes = {name: ring.layout.get(name, 1) for name in ("tensor", "context", "expert", "data", "pipeline")}
    try:
        topology = Topology(**sizes)
        return {rank: topology.coordinates(rank) for rank in range(ring.world)}
    except TopologyError:
        return {}


def p2p_peer(comm: Communicator | None, rank: int) -> int | None:
    """Return the other end of a directed pair, seen from `rank`; None for any other communicator."""
    if comm is None or comm.kind != "p2p" or len(comm.members) != 2:
        return None
    source, destination = comm.members
    return destination if rank == source else source
