"""Anchors of one step that tie two clocks together.

Messages: the shortest time D from post to receipt in each direction bounds the offset from both sides, as in NTP (RFC
5905): offset = (D_ab - D_ba) / 2 within (D_ab + D_ba) / 2. Collectives: all members end together, give or take. Starts
are never used: they carry the lateness that is to be measured. The ends of the step are the last resort.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.graph.matched_step import MatchedStep
from megatronapp_analyzer.graph.matching import Collectives, Index, Messages
from megatronapp_analyzer.graph.records import bytes_of
from megatronapp_analyzer.model import RankRecords, select_rows
from megatronapp_common.trace import DURATION_UNIT_NS, RecordKind
from megatronapp_native import shortest_transfers

STEP_END_UNCERTAINTY_NS = 5e7
"""Assumed largest difference between the ends of the same step on two nodes."""
STEP = frozenset({RecordKind.STEP})
COLLECTIVE_FLOOR_NS = 2e4
"""Smallest uncertainty of the ends of collectives."""

Nanoseconds = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Anchor:
    """A difference of clocks: `second` shows `offset_ns` more than `first`, within `uncertainty_ns`."""

    first: int
    second: int
    offset_ns: float
    uncertainty_ns: float


def anchors_of(step: MatchedStep, domain: Index) -> list[Anchor]:
    """Return the best anchor of every pair of clocks in one step. `domain[rank]` numbers the clock of a rank."""
    spans = step.spans
    found = _by_messages(spans, step.messages, domain)
    found += _by_collectives(spans, step.collectives, domain)
    found += _by_step_ends(step.of_kinds(STEP), domain)
    best: dict[tuple[int, int], Anchor] = {}
    for anchor in found:
        pair = (anchor.first, anchor.second)
        if pair not in best or anchor.uncertainty_ns < best[pair].uncertainty_ns:
            best[pair] = anchor
    return list(best.values())


def _ends(spans: RankRecords) -> Index:
    ends: Index = spans["start_ns"].astype(np.int64) + spans["duration"].astype(np.int64) * DURATION_UNIT_NS
    return ends


def _by_messages(spans: RankRecords, messages: Messages, domain: Index) -> list[Anchor]:
    domains = int(domain.max()) + 1
    # Messages are sorted by pair of ranks, so that few runs of equal ways remain to be sorted.
    way, shortest_ns = shortest_transfers(bytes_of(spans), messages.send_post, messages.recv_wait, domain)
    if not len(way):
        return []
    names, where = np.unique(way, return_inverse=True)
    shortest = np.full(len(names), np.iinfo(np.int64).max)
    np.minimum.at(shortest, where, shortest_ns)
    first, second = names // domains, names % domains
    back = np.minimum(np.searchsorted(names, second * domains + first), len(names) - 1)
    both = (first < second) & (names[back] == second * domains + first)
    return [
        Anchor(first=a, second=b, offset_ns=(there - reply) / 2, uncertainty_ns=max((there + reply) / 2, 0.0))
        for a, b, there, reply in zip(
            first[both].tolist(),
            second[both].tolist(),
            shortest[both].astype(np.float64).tolist(),
            shortest[back[both]].astype(np.float64).tolist(),
            strict=True,
        )
    ]


def _by_collectives(spans: RankRecords, groups: Collectives, domain: Index) -> list[Anchor]:
    domains = int(domain.max()) + 1
    instance = np.repeat(np.arange(len(groups)), np.diff(groups.begin))
    whole = groups.complete[instance]
    instance, member = instance[whole], groups.record[whole]
    if not len(member):
        return []
    names, where = np.unique(instance * domains + domain[spans["rank"][member]], return_inverse=True)
    middle = _medians(where, _ends(select_rows(spans, member)).astype(np.float64), len(names))
    own = names // domains
    first = np.searchsorted(own, own)  # the least clock of each instance
    others = np.flatnonzero(first != np.arange(len(names)))
    pair = names[first[others]] % domains * domains + names[others] % domains
    pairs, of_pair = np.unique(pair, return_inverse=True)
    difference = middle[others] - middle[first[others]]
    offset = _medians(of_pair, difference, len(pairs))
    spread = 1.4826 * _medians(of_pair, np.abs(difference - offset[of_pair]), len(pairs))
    count = np.bincount(of_pair, minlength=len(pairs))
    doubt = np.where(count > 2, np.maximum(spread, COLLECTIVE_FLOOR_NS), STEP_END_UNCERTAINTY_NS / 2)
    return _anchors(pairs // domains, pairs % domains, offset, doubt)


def _by_step_ends(steps: RankRecords, domain: Index) -> list[Anchor]:
    end = _ends(steps)
    present, where = np.unique(domain[steps["rank"]], return_inverse=True)
    if len(present) < 2:
        return []
    middle = _medians(where, end.astype(np.float64), len(present))
    others = present[1:]
    doubt = np.full(len(others), STEP_END_UNCERTAINTY_NS)
    return _anchors(np.full(len(others), present[0]), others, middle[1:] - middle[0], doubt)


def _anchors(first: Index, second: Index, offset_ns: Nanoseconds, uncertainty_ns: Nanoseconds) -> list[Anchor]:
    columns = (first.tolist(), second.tolist(), offset_ns.tolist(), uncertainty_ns.tolist())
    return [
        Anchor(first=a, second=b, offset_ns=offset, uncertainty_ns=doubt)
        for a, b, offset, doubt in zip(*columns, strict=True)
    ]


def _medians(group: Index, values: Nanoseconds, groups: int) -> Nanoseconds:
    """Return the median of each group, none of which is empty; the mean of two middles."""
    order = np.lexsort((values, group))
    size = np.bincount(group, minlength=groups)
    begin = np.cumsum(size) - size
    ordered = values[order]
    found: Nanoseconds = (ordered[begin + (size - 1) // 2] + ordered[begin + size // 2]) / 2
    return found
