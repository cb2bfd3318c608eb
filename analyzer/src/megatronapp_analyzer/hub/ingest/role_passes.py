"""Figures of a step of MegaFBD: how busy the ranks of each role are, their passes, their waits for the other role.

Forward ranks record FORWARD, backward ranks BACKWARD and WEIGHT. Pure NumPy.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.hub.ingest.digest import durations_ns, is_kind
from megatronapp_analyzer.hub.ingest.message_arrows import peers
from megatronapp_analyzer.hub.ingest.pipeline_passes import Transfers
from megatronapp_analyzer.hub.ingest.step_cache import StepCache
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_analyzer.model import JobLayout
from megatronapp_common.topology import RankRole
from megatronapp_common.trace import PASS_KINDS, RecordKind

Floats = NDArray[np.float64]
ROLES = (RankRole.FORWARD, RankRole.BACKWARD)
_PLACE_BITS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class RolePasses:
    """Figures of one step. The arrays have an entry for each rank, NaN for ranks without a pass."""

    attempt: int
    step: int
    seconds: float
    """From the first pass of the step to the end of its last one, over all ranks."""
    busy: Floats
    """Share of that in which the rank ran passes."""
    pass_seconds: Floats
    """Time of the passes of a microbatch, all chunks: F on forward ranks, B and W on backward ranks."""
    wait_seconds: Floats
    """Time in which the rank had nothing to run but what a rank of the other role had not sent: shipments that a
    backward rank waited for, credits that a forward rank waited for."""


def role_passes(step: StoredStep, layout: JobLayout) -> RolePasses | None:
    """Return the figures of a step; None without roles or passes, or with ranks that the layout does not have.

    Starts of ranks on several nodes are compared on the clocks that the store aligned.
    """
    records = step.view.records
    passes = is_kind(records, PASS_KINDS)
    ranks = records["rank"][passes]
    if not layout.roles or not len(ranks) or int(records["rank"].max()) >= layout.world:
        return None
    starts = records["start_ns"][passes].astype(np.int64) + step.offsets_ns[ranks]
    lengths = durations_ns(records[passes])
    seconds = float((starts + lengths).max() - starts.min()) * 1e-9
    busy = np.bincount(ranks, weights=lengths * 1e-9, minlength=layout.world)
    places = np.unique(ranks.astype(np.int64) << _PLACE_BITS | records["microbatch"][passes])
    microbatches = np.bincount(places >> _PLACE_BITS, minlength=layout.world)
    seen = microbatches > 0
    return RolePasses(
        attempt=step.view.attempt,
        step=step.view.step,
        seconds=seconds,
        busy=np.where(seen, np.clip(busy / max(seconds, 1e-12), 0, 1), np.nan),
        pass_seconds=np.where(seen, busy / np.maximum(microbatches, 1), np.nan),
        wait_seconds=np.where(seen, _waits(step, layout), np.nan),
    )


def _waits(step: StoredStep, layout: JobLayout) -> Floats:
    """Return the seconds that each rank waited for messages of ranks of the other role."""
    records = step.view.records
    waits = np.flatnonzero(is_kind(records, (RecordKind.RECV_WAIT,)))
    source, ranks = peers(step.view)[waits], records["rank"][waits]
    is_backward = np.array([role is RankRole.BACKWARD for role in layout.roles])
    known = (source >= 0) & (source < layout.world)
    crosses = known & (is_backward[np.where(known, source, 0)] != is_backward[ranks])
    seconds = durations_ns(records[waits]) * 1e-9
    sums: Floats = np.bincount(ranks[crosses], weights=seconds[crosses], minlength=layout.world).astype(np.float64)
    return sums


def ranks_of(role: RankRole, layout: JobLayout) -> NDArray[np.int64]:
    """Return the ranks of a role."""
    return np.array([rank for rank, own in enumerate(layout.roles) if own is role], np.int64)


def shipments(transfers: Iterable[Transfers], layout: JobLayout) -> list[Transfers]:
    """Return the transfers from forward to backward ranks: saved tensors, and reports of the loss with a few bytes."""
    return [
        pair
        for pair in transfers
        if layout.roles
        and max(pair.source, pair.destination) < layout.world
        and (layout.roles[pair.source], layout.roles[pair.destination]) == ROLES
    ]


class RolesCache:
    """Figures of steps that were requested before."""

    def __init__(self) -> None:
        self._cache: StepCache[RolePasses] = StepCache(_bytes_of)

    def figures(self, steps: Iterable[StoredStep], layout: JobLayout) -> list[RolePasses]:
        """Return the figures of stored steps that have passes of roles."""
        return self._cache.figures(steps, lambda step: role_passes(step, layout))


def _bytes_of(passes: RolePasses | None) -> int:
    """Return an upper bound of what figures take: three arrays, and some 500 bytes of objects."""
    return 512 + (0 if passes is None else 3 * passes.busy.nbytes)
