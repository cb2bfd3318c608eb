"""Ranks without progress, separated into those that hang and those that wait for them."""

import dataclasses
from collections.abc import Sequence

from megatronapp_analyzer.detect.settings import DetectorSettings
from megatronapp_analyzer.model import CurrentSpan, RankLiveness
from megatronapp_common.trace import COLLECTIVE_KINDS, PASS_KINDS, RecordKind

WAITING_KINDS = COLLECTIVE_KINDS | {RecordKind.RECV_WAIT, RecordKind.SEND_WAIT}
PAUSING_KINDS = frozenset({RecordKind.CHECKPOINT, RecordKind.EVALUATE, RecordKind.PAUSE})
STOPPED = frozenset({"T", "t"})
CLEARLY_EARLIER_S = 1.0
"""Lead by which the first of several silent ranks is taken for the cause."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """A hang: `culprits` stopped by themselves, `victims` wait for them. `certain` is true for direct evidence."""

    culprits: tuple[int, ...]
    victims: tuple[int, ...]
    silent_s: float
    certain: bool
    reason: str


def find(ranks: Sequence[RankLiveness], usual_step_s: float | None, settings: DetectorSettings) -> Hang | None:
    """Return the hang that the ranks' heartbeats show, or None. `usual_step_s` is None before a first finished step."""
    if any(not rank.alive and not rank.closed for rank in ranks):
        return None  # a rank that died is the launcher's and the backend's to report; the others wait for it
    patience = {rank.rank: _patience_s(rank, usual_step_s, settings) for rank in ranks}
    if not any(_silent_s(rank) > patience[rank.rank] for rank in ranks if not rank.closed):
        return None
    # Victims may fall silent before their culprit: so ranks that are about to fall silent are judged, too.
    silent = [rank for rank in ranks if not rank.closed and _silent_s(rank) > patience[rank.rank] / 2]
    culprits, certain, reason = _culprits(silent)
    names = tuple(sorted(rank.rank for rank in culprits))
    return Hang(
        culprits=names,
        victims=tuple(sorted(rank.rank for rank in silent if rank.rank not in names)),
        silent_s=max(_silent_s(rank) for rank in culprits),
        certain=certain,
        reason=reason,
    )


def position(rank: RankLiveness) -> CurrentSpan | None:
    """Return the span that holds up the rank: its device's while that has work, otherwise its host's.

    Hosts run ahead: when a device hangs, its host and those of all others are inside the next wait for a device. The
    span of the whole step says nothing about what the device does there.
    """
    device = rank.device_span
    return rank.open_span if device is None or device.kind == RecordKind.STEP else device


def waits(rank: RankLiveness) -> bool:
    """Return true if the rank is inside a wait for others."""
    span = position(rank)
    return span is not None and span.kind in WAITING_KINDS


def _culprits(silent: list[RankLiveness]) -> tuple[list[RankLiveness], bool, str]:
    stopped = [rank for rank in silent if rank.process_state in STOPPED]
    if stopped:
        return stopped, True, "its process is stopped"
    working = [rank for rank in silent if not waits(rank)]
    if working:
        return working, not _may_wait_inside(working), _reason(working, others=len(working) < len(silent))
    order = sorted(silent, key=_silent_s, reverse=True)
    if len(order) > 1 and _silent_s(order[0]) - _silent_s(order[1]) > CLEARLY_EARLIER_S:
        return order[:1], False, "all wait, and it was the first to fall silent"
    return order, False, "all wait for each other"


def _may_wait_inside(working: list[RankLiveness]) -> bool:
    """Return true for several ranks whose devices are inside passes, in which tensor-parallel ranks wait for each other
    without a span that says so.
    """
    return len(working) > 1 and all(
        rank.device_span is not None and rank.device_span.kind in PASS_KINDS and position(rank) is rank.device_span
        for rank in working
    )


def _reason(working: list[RankLiveness], *, others: bool) -> str:
    suffix = ", while others wait" if others else ""
    if _may_wait_inside(working):
        return f"its device has not finished a pass, in which it may wait for its tensor-parallel peers{suffix}"
    if all(rank.device_span is not None and position(rank) is rank.device_span for rank in working):
        return f"its device has not finished its work{suffix}"
    return f"it is not inside a wait{suffix}"


def _silent_s(rank: RankLiveness) -> float:
    return (rank.now_ns - rank.heartbeat_ns) * 1e-9


def _patience_s(rank: RankLiveness, usual_step_s: float | None, settings: DetectorSettings) -> float:
    if rank.process_state in STOPPED:
        return settings.hang_after_s  # a stopped process never ends its current span
    if usual_step_s is None:
        return settings.startup_s
    if rank.open_span is not None and rank.open_span.kind in PAUSING_KINDS:
        return settings.pause_s
    return max(settings.hang_after_s, settings.hang_steps * usual_step_s)
