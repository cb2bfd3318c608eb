"""Device spans that grow because a stalling host launches their kernels late.

A host that runs ahead of its device costs nothing. One that stalls loses the lead, and from then on the device waits
for launches inside its spans, too: they grow by what launching takes, which is no second fault. A device that is slow
itself takes much longer than launching does, and stays a finding of its own.
"""

import dataclasses
from collections.abc import Sequence

from megatronapp_analyzer.detect.candidates import Candidate

LATE_RATIO = 1.6
"""Launching alone makes a device's spans at most this many times as long; beyond, the device itself is slow."""
LATE_COST = 3.0
"""Nor does it cost more than this many times the stalls themselves."""


def late_units(compute: Sequence[Candidate], host: Sequence[Candidate]) -> list[Candidate]:
    """Those of `compute`, candidates of one unit each, that stalls of the same ranks explain."""
    return [one for one in compute if _explained(one, host)]


def with_late(host: Candidate, late: Sequence[Candidate]) -> Candidate:
    """A stalling host with what it explains."""
    own = set(host.subject.ranks)
    ratios = [(rank, one.ratio) for one in late if own & set(one.subject.ranks) for rank in one.subject.ranks]
    return dataclasses.replace(host, late=tuple(ratios))


def _explained(compute: Candidate, host: Sequence[Candidate]) -> bool:
    stalls = [one.excess_s for one in host if set(compute.subject.ranks) <= set(one.subject.ranks)]
    return bool(stalls) and compute.ratio < LATE_RATIO and compute.excess_s <= LATE_COST * max(stalls)
