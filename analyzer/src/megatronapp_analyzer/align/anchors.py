"""Anchors of one step that tie two clocks together.

Messages: the shortest time D from post to receipt in each direction bounds the offset from both sides, as in NTP (RFC
5905): offset = (D_ab - D_ba) / 2 within (D_ab + D_ba) / 2. Collectives: all members end together, give or take. Starts
are never used: they carry the lateness that is to be measured. The ends of the step are the last resort.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.graph import records as rec
from megatronapp_analyzer.graph.matching import Collectives, Index, Messages, collectives_of, messages_of
from megatronapp_analyzer.model import RankRecords, StepRecords, select_rows
from megatronapp_common.trace import DURATION_UNIT_NS, RecordKind

STEP_END_UNCERTAINTY_NS = 5e7
"""Assumed largest difference between the ends of the same step on two nodes."""
COLLECTIVE_FLOOR_NS = 2e4
"""Smallest uncertainty of the ends of collectives."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Anchor:
    """A difference of clocks: `second` shows `offset_ns` more than `first`, within `uncertainty_ns`."""

    first: int
    second: int
    offset_ns: float
    uncertainty_ns: float


def anchors_of(view: StepRecords, domain: Index) -> list[Anchor]:
    """Return the best anchor of every pair of clocks in one step. `domain[rank]` numbers the clock of a rank."""
    spans = rec.stream(view.records)
    index = rec.comm_index(view.comms)
    start = spans["start_ns"].astype(np.int64)
    end = start + spans["duration"].astype(np.int64) * DURATION_UNIT_NS
    found = _by_messages(spans, messages_of(spans, index), start, end, domain)
    found += _by_collectives(spans, collectives_of(spans, index), end, domain)
    found += _by_step_ends(view.records, domain)
    best: dict[tuple[int, int], Anchor] = {}
    for anchor in found:
        pair = (anchor.first, anchor.second)
        if pair not in best or anchor.uncertainty_ns < best[pair].uncertainty_ns:
            best[pair] = anchor
    return list(best.values())


def _by_messages(spans: RankRecords, messages: Messages, start: Index, end: Index, domain: Index) -> list[Anchor]:
    domains = int(domain.max()) + 1
    matched = messages.matched
    send, recv = messages.send_post[matched], messages.recv_wait[matched]
    source, target = domain[spans["rank"][send]], domain[spans["rank"][recv]]
    shortest = np.full(domains * domains, np.iinfo(np.int64).max)
    np.minimum.at(shortest, source * domains + target, end[recv] - start[send])
    table = shortest.reshape(domains, domains)
    seen = table < np.iinfo(np.int64).max
    return [
        Anchor(
            first=int(a),
            second=int(b),
            offset_ns=(float(table[a, b]) - float(table[b, a])) / 2,
            uncertainty_ns=max((float(table[a, b]) + float(table[b, a])) / 2, 0.0),
        )
        for a, b in zip(*np.nonzero(np.triu(seen & seen.T, 1)), strict=True)
    ]


def _by_collectives(spans: RankRecords, groups: Collectives, end: Index, domain: Index) -> list[Anchor]:
    differences: dict[tuple[int, int], list[NDArray[np.float64]]] = {}
    for number in np.flatnonzero(groups.complete):
        member = groups.record[groups.begin[number] : groups.begin[number + 1]]
        where = domain[spans["rank"][member]]
        first = int(where.min())
        for second in np.unique(where[where != first]):
            difference = np.median(end[member][where == second]) - np.median(end[member][where == first])
            differences.setdefault((first, int(second)), []).append(difference)
    found = []
    for (first, second), values in differences.items():
        middle = float(np.median(values))
        spread = 1.4826 * float(np.median(np.abs(np.array(values) - middle)))
        doubt = max(spread, COLLECTIVE_FLOOR_NS) if len(values) > 2 else STEP_END_UNCERTAINTY_NS / 2
        found.append(Anchor(first=first, second=second, offset_ns=middle, uncertainty_ns=doubt))
    return found


def _by_step_ends(records: RankRecords, domain: Index) -> list[Anchor]:
    steps = select_rows(records, records["kind"] == RecordKind.STEP)
    end = steps["start_ns"].astype(np.int64) + steps["duration"].astype(np.int64) * DURATION_UNIT_NS
    where = domain[steps["rank"]]
    present = np.unique(where)
    return [
        Anchor(
            first=int(present[0]),
            second=int(second),
            offset_ns=float(np.median(end[where == second]) - np.median(end[where == present[0]])),
            uncertainty_ns=STEP_END_UNCERTAINTY_NS,
        )
        for second in present[1:]
    ]
