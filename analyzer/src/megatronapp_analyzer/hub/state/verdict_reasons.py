"""Reasons of verdicts: the counters of the suspect's host and device in the steps that are evidence.

A reason is added to what the detector reports, and changes neither its cause nor whether it is reported.
"""

import dataclasses
import math
import statistics
from collections.abc import Container, Iterable, Mapping, Sequence

from megatronapp_analyzer.detect.reasons.device_reasons import ComparedDevices, explain_device
from megatronapp_analyzer.detect.reasons.explanation import Explanation
from megatronapp_analyzer.detect.reasons.host_reasons import ComparedHosts, explain_host
from megatronapp_analyzer.detect.reasons.readings import CounterSamples, DeviceReading, HostReading
from megatronapp_analyzer.hub.ingest.digest import StepDigest
from megatronapp_analyzer.hub.ingest.ingest import AttemptState, TraceIngest
from megatronapp_analyzer.hub.ingest.ring_metadata import RankRing
from megatronapp_analyzer.model import Cause, SubjectType, Verdict, VerdictState

DEVICE_CAUSES = frozenset({Cause.COMPUTE, Cause.MEMORY, Cause.REGRESSION, Cause.UNDETERMINED})
SAMPLED_NS = 1_000_000_000
"""Time after a step in which its last sample is taken: launchers sample once a second."""
BEFORE_STEPS = 64
"""Steps before a fault that show what was usual for the suspect."""
SETTLED_STEPS = 16
"""First steps of an attempt: of a suspect that was slow in them, what was usual is not known."""
RECENT_STEPS = 256
"""Newest steps among which those of a verdict usually are."""
REFRESH_STEPS = 8
"""Steps after which counters are read again for a verdict whose reason is known."""
MOST_WORKERS = 32
"""Workers whose devices and hosts a suspect is compared with."""
MOST_KNOWN = 64
"""Verdicts whose explanations are stored until they are cleared."""
Device = tuple[int, int]
"""Worker and index of a GPU among those that it sees."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Readings:
    """Devices and hosts in some steps, those of the suspects and of others."""

    devices: Mapping[Device, DeviceReading]
    hosts: Mapping[int, HostReading]
    """By rank."""

    def without(self, devices: Container[Device]) -> list[DeviceReading]:
        """Return the other devices."""
        return [reading for device, reading in self.devices.items() if device not in devices]

    def hosts_of(self, ranks: Iterable[int]) -> list[HostReading]:
        """Return the hosts of those of `ranks` that have samples."""
        return [self.hosts[rank] for rank in ranks if rank in self.hosts]


@dataclasses.dataclass(slots=True)
class _Known:
    """State of the search for the reason of a verdict that is not cleared."""

    before: _Readings
    found: Explanation = dataclasses.field(default_factory=Explanation)
    """The newest explanation with a reason: the samples of later steps may show none."""
    step: int = -1
    """Newest step that it is from."""


class VerdictReasons:
    """Finder of the reasons of verdicts. Reads what the hub has in memory."""

    def __init__(self, ingest: TraceIngest) -> None:
        self._ingest = ingest
        self._known: dict[str, _Known] = {}

    def explain(self, verdict: Verdict) -> Verdict:
        """Return a verdict with its reason and the evidence for it, as far as counters show them."""
        state = self._ingest.attempts.get(verdict.since.attempt)
        if state is None or (verdict.cause is not Cause.HOST and verdict.cause not in DEVICE_CAUSES):
            return verdict
        known = self._known.get(verdict.id)
        suspects = [state.rings[rank] for rank in verdict.subject.ranks if rank in state.rings]
        if suspects and (known is None or self._is_due(verdict, known)) and (steps := self._steps(verdict)):
            known = self._search(verdict, state, suspects, steps)
        if verdict.state is VerdictState.CLEARED:
            self._known.pop(verdict.id, None)
        return verdict if known is None else known.found.added_to(verdict)

    def _is_due(self, verdict: Verdict, known: _Known) -> bool:
        """Return whether counters are to be read again: with each step until there is a reason, then now and then."""
        newest = max(verdict.evidence_steps, default=-1)
        return newest >= known.step + (1 if known.found.reason is None else REFRESH_STEPS)

    def _search(
        self, verdict: Verdict, state: AttemptState, suspects: Sequence[RankRing], steps: Sequence[StepDigest]
    ) -> _Known:
        """Search for the reason in the counters of the steps that are evidence."""
        compared = _compared(state, suspects)
        known = self._known.get(verdict.id)
        if known is None:
            known = self._known[verdict.id] = _Known(self._read_before(verdict, state, compared))
            if len(self._known) > MOST_KNOWN:
                del self._known[next(iter(self._known))]
        now = self._read(state, compared, steps, tail_ns=SAMPLED_NS)
        if verdict.cause is Cause.HOST:
            step_s = max(statistics.mean(digest.duration_ns for digest in steps), 1) * 1e-9
            lost_part = verdict.seconds_per_step / step_s
            explanation = explain_host(verdict.reason, lost_part, _hosts(suspects, compared, now, known.before))
        else:
            explanation = _explain_device(verdict, suspects, now, known.before)
        if explanation.reason is not None or known.found.reason is None:
            known.found = explanation
        known.step = max(verdict.evidence_steps)
        return known

    def _steps(self, verdict: Verdict) -> list[StepDigest]:
        """Return the steps that are evidence."""
        chosen = {(verdict.since.attempt, step) for step in verdict.evidence_steps}
        if not chosen:
            return []
        recent = self._ingest.store.recent(RECENT_STEPS)
        found = [digest for digest in recent if (digest.attempt, digest.step) in chosen]
        if len(found) < len(chosen):
            steps = self._ingest.store.digests(min(verdict.evidence_steps), max(verdict.evidence_steps))
            found = [digest for digest in steps if (digest.attempt, digest.step) in chosen]
        return found

    def _read_before(self, verdict: Verdict, state: AttemptState, rings: Sequence[RankRing]) -> _Readings:
        """Read the counters in steps before a fault, without the first ones of the attempt."""
        since, attempt = verdict.since.step, verdict.since.attempt
        every = [digest for digest in self._ingest.store.digests(None, since - 1) if digest.attempt == attempt]
        return self._read(state, rings, every[SETTLED_STEPS:][-BEFORE_STEPS:])

    def _read(
        self, state: AttemptState, rings: Sequence[RankRing], steps: Sequence[StepDigest], *, tail_ns: int = 0
    ) -> _Readings:
        """Read the counters of ranks in some steps, and in the time `tail_ns` after each."""
        devices: dict[Device, DeviceReading] = {}
        hosts: dict[int, HostReading] = {}
        samples: dict[int, CounterSamples | None] = {}
        for ring in rings:
            if ring.worker not in samples:
                periods = _periods(steps, ring.real_offset_ns, tail_ns)
                samples[ring.worker] = self._ingest.counter_history.select(state.attempt, ring.worker, periods)
            of_worker = samples[ring.worker]
            if of_worker is None:
                continue
            hosts[ring.rank] = HostReading.of(of_worker, ring.local_rank)
            if ring.gpu is not None and (ring.worker, ring.gpu) not in devices:  # ranks may use one together
                devices[ring.worker, ring.gpu] = DeviceReading.of(of_worker, ring.gpu)
        return _Readings(devices=devices, hosts=hosts)


def _periods(steps: Sequence[StepDigest], real_offset_ns: int, tail_ns: int) -> list[tuple[int, int]]:
    """Return the times of steps on a worker's clock, those that follow each other as one."""
    periods: list[tuple[int, int]] = []
    for digest in sorted(steps, key=lambda digest: digest.start_real_ns):
        begin = digest.start_real_ns - real_offset_ns
        end = begin + digest.duration_ns + tail_ns
        if periods and begin <= periods[-1][1]:
            periods[-1] = (periods[-1][0], max(end, periods[-1][1]))
        else:
            periods.append((begin, end))
    return periods


def _compared(state: AttemptState, suspects: Sequence[RankRing]) -> list[RankRing]:
    """Return the ranks of the suspects' workers and of others, evenly chosen where there are many."""
    own = {ring.worker for ring in suspects}
    others = sorted({ring.worker for ring in state.rings.values()} - own)
    stride = -(-len(others) // MOST_WORKERS) or 1
    chosen = own | set(others[::stride])
    return [ring for _, ring in sorted(state.rings.items()) if ring.worker in chosen]


def _explain_device(verdict: Verdict, suspects: Sequence[RankRing], now: _Readings, before: _Readings) -> Explanation:
    """Compare the devices of suspects with the others."""
    rank_of = {(ring.worker, ring.gpu): ring.rank for ring in suspects if ring.gpu is not None}
    own = [device for device in rank_of if device in now.devices]
    if not own:
        return Explanation()
    name = ""
    if verdict.subject.type is SubjectType.RANK and len(own) > 1:  # one of them is slow: that with the lowest clock
        slowest = min(own, key=lambda device: _clock(now.devices[device]))
        own, name = [slowest], f" of rank {rank_of[slowest]}"
    devices = ComparedDevices(
        suspect=DeviceReading.typical([now.devices[device] for device in own]),
        suspects=len(own),
        peers=now.without(rank_of),
        before=DeviceReading.typical([before.devices[device] for device in own if device in before.devices]),
        peers_before=before.without(rank_of),
        name=name,
    )
    return explain_device(verdict.cause, verdict.slowdown, devices)


def _clock(reading: DeviceReading) -> float:
    return math.inf if math.isnan(reading.clock_mhz) else reading.clock_mhz


def _hosts(
    suspects: Sequence[RankRing], compared: Sequence[RankRing], now: _Readings, before: _Readings
) -> ComparedHosts:
    """Return the hosts of suspects and of the others."""
    ranks, workers, nodes = ({getattr(ring, name) for ring in suspects} for name in ("rank", "worker", "node"))
    first = {ring.worker: ring for ring in reversed(compared) if ring.worker not in workers}
    return ComparedHosts(
        suspect=HostReading.typical(now.hosts_of(ring.rank for ring in suspects)),
        ranks=now.hosts_of(ring.rank for ring in compared if ring.rank not in ranks),
        workers=now.hosts_of(ring.rank for ring in first.values()),
        nodes=now.hosts_of(ring.rank for ring in first.values() if ring.node not in nodes),
        before=HostReading.typical(before.hosts_of(ring.rank for ring in suspects)),
    )
