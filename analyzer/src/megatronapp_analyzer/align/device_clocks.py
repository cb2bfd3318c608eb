"""Checks of the clocks of devices, which the recorders of their ranks have fitted to the clocks of their nodes.

The fit states an uncertainty that the analyzer cannot verify from one rank. Two facts may contradict it, however slow a
rank is: all ranks have entered a blocking collective before any of them leaves it, and a message is sent before it is
received. A clock that contradicts them is corrected where the ends of collectives say by how much; otherwise its
uncertainty covers the contradiction, so that what rests on it is not judged.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.graph import records as rec
from megatronapp_analyzer.graph.matching import Collectives, Index, Messages, collectives_of, messages_of
from megatronapp_analyzer.model import RankRecords, StepRecords, select_rows
from megatronapp_common.trace import DURATION_UNIT_NS, Flag, RecordKind

FITTED_NS = 2e4
"""Uncertainty of a device's clock against its node's, as the recorder fits it."""
CONTRADICTION_NS = 5e4
"""Contradiction from which on a clock is held to be wrong: twice the uncertainty, and the resolution of records."""
BLOCKING_KINDS = frozenset({RecordKind.GRAD_NORM, RecordKind.LOSS_REDUCE, RecordKind.EMBED_REDUCE})
"""Collectives that take place between begin and end of their spans; others may overlap with passes."""

HOST_KINDS: NDArray[np.bool_] = np.isin(np.arange(256), (RecordKind.METRIC, RecordKind.COUNTER))
"""Kinds whose times are never those of a device."""
Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeviceClocks:
    """Difference of each device from its node's clock, and its uncertainty, in ns; 0 for ranks without a device."""

    offset_ns: Index
    uncertainty_ns: Floats


def no_devices(world: int) -> DeviceClocks:
    """Return the clocks of a job whose ranks have no device."""
    return DeviceClocks(offset_ns=np.zeros(world, np.int64), uncertainty_ns=np.zeros(world))


def has_device_clock(records: RankRecords) -> NDArray[np.bool_]:
    """Return a mask of the records whose times are those of a device."""
    mask: NDArray[np.bool_] = (records["flags"] & Flag.DEVICE_CLOCK) != 0
    if mask.any():
        mask &= ~HOST_KINDS[records["kind"]]
    return mask


def check(view: StepRecords, domain: Index, index: rec.CommIndex | None = None) -> DeviceClocks:
    """Check the devices of one step. `domain[rank]` numbers the node's clock: only within one are times compared."""
    world = len(domain)
    of_device = select_rows(view.records, has_device_clock(view.records))
    offset, uncertainty = np.zeros(world, np.int64), np.zeros(world)
    uncertainty[np.unique(of_device["rank"])] = FITTED_NS
    spans = rec.stream(of_device)
    if len(spans):
        index = index or rec.comm_index(view.comms)
        start = spans["start_ns"].astype(np.int64)
        end = start + spans["duration"].astype(np.int64) * DURATION_UNIT_NS
        _by_collectives(spans, collectives_of(spans, index), (start, end), domain, (offset, uncertainty))
        corrected = start - offset[spans["rank"]], end - offset[spans["rank"]]
        _by_messages(spans, messages_of(spans, index), corrected, domain, uncertainty)
    return DeviceClocks(offset_ns=offset, uncertainty_ns=uncertainty)


def _by_collectives(
    spans: RankRecords, groups: Collectives, times: tuple[Index, Index], domain: Index, found: tuple[Index, Floats]
) -> None:
    """Correct the clocks that leave a collective before others enter it, or enter it after others have left."""
    start, end = times
    offset, uncertainty = found
    worst = np.zeros(len(domain))
    apart: dict[int, list[float]] = {}
    usable = groups.complete & rec.is_kind(groups.kind.astype(np.uint8), BLOCKING_KINDS)
    for number in np.flatnonzero(usable):
        member = groups.record[groups.begin[number] : groups.begin[number + 1]]
        ranks = spans["rank"][member]
        if len(member) < 2 or np.ptp(domain[ranks]):
            continue
        middle_start, middle_end = np.median(start[member]), np.median(end[member])
        contradiction = np.maximum(start[member] - middle_end, middle_start - end[member])
        worst[ranks] = np.maximum(worst[ranks], contradiction)
        for rank, difference in zip(ranks.tolist(), end[member] - middle_end, strict=True):
            apart.setdefault(rank, []).append(float(difference))
    for rank in np.flatnonzero(worst > CONTRADICTION_NS).tolist():
        values = np.array(apart[rank])
        offset[rank] = round(float(np.median(values)))
        spread = 1.4826 * float(np.median(np.abs(values - np.median(values))))
        uncertainty[rank] = FITTED_NS + (spread if len(values) > 2 else abs(float(offset[rank])))


def _by_messages(
    spans: RankRecords, messages: Messages, times: tuple[Index, Index], domain: Index, uncertainty: Floats
) -> None:
    """Let the uncertainty of ranks cover messages that are received before they were sent.

    Of the two ends it is that which contradicts its partners by more, or both.
    """
    start, end = times
    matched = messages.matched
    send, recv = messages.send_post[matched], messages.recv_wait[matched]
    source, target = spans["rank"][send], spans["rank"][recv]
    early = np.where(domain[source] == domain[target], start[send] - end[recv], 0).astype(np.float64)
    wrong = early > CONTRADICTION_NS
    source, target, early = source[wrong], target[wrong], early[wrong]
    total = np.bincount(source, early, len(domain)) + np.bincount(target, early, len(domain))
    for end, other in ((source, target), (target, source)):
        is_worse = total[end] >= total[other]
        np.maximum.at(uncertainty, end[is_worse], early[is_worse])
