"""Reason of slow compute on devices: a lower clock, or another process on the device.

A clock that is lower than that of the other devices is the reason if it makes up at least half of the slowdown, and if
it was not as low before the fault. Another process is not seen by itself: the memory in use on its device grows by what
any CUDA context takes, together with the slowdown, while that of the other devices does not.
"""

import dataclasses
import math
from collections.abc import Sequence

from megatronapp_analyzer.detect.reasons.explanation import Explanation, is_known, others_text
from megatronapp_analyzer.detect.reasons.readings import THROTTLES, UNKNOWN, DeviceReading
from megatronapp_analyzer.model import Cause, Reason

LEAST_DROP = math.log(1.03)
"""Least difference of clocks, in logarithms, that is a reason: healthy devices differ by a few percent."""
EXPLAINED_PART = 0.5
"""Part of the slowdown, in logarithms, that a lower clock must make up."""
LEAST_CONTEXT_MIB = 200.0
"""Memory of a device that a process takes at least; a CUDA context without any data takes more."""
MEGAHERTZ_PER_GIGAHERTZ = 1000.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ComparedDevices:
    """Devices of a suspect and those that they are compared with, in the same steps and before the fault."""

    suspect: DeviceReading
    suspects: int = 1
    """Number of devices that `suspect` is the median of."""
    peers: Sequence[DeviceReading] = ()
    """The other devices of the job in the same steps."""
    before: DeviceReading = dataclasses.field(default_factory=DeviceReading)
    """The suspect before the fault."""
    peers_before: Sequence[DeviceReading] = ()
    name: str = ""
    """Which of several devices `suspect` is, such as ` of rank 3`."""

    @property
    def typical_peer(self) -> DeviceReading:
        """Median of the peers."""
        return DeviceReading.typical(self.peers)

    @property
    def clock_drop(self) -> float:
        """Logarithm of the healthy over the present clock; NaN where nothing is known to compare with.

        The smaller one of the differences to the peers and to the time before: a device that always had a lower clock
        has become slow for another reason, and devices whose clocks fell together did not become unlike.
        """
        drops = [
            math.log(other) - math.log(self.suspect.clock_mhz)
            for other in (self.typical_peer.clock_mhz, self.before.clock_mhz)
            if other > 0 and self.suspect.clock_mhz > 0
        ]
        return min(drops, default=UNKNOWN)

    @property
    def memory_growth_mib(self) -> float:
        """Growth of the memory in use since before the fault, beyond that of the peers; NaN where it is unknown."""
        growth = self.suspect.memory_mib - self.before.memory_mib
        others = self.typical_peer.memory_mib - DeviceReading.typical(self.peers_before).memory_mib
        return growth - (others if is_known(others) else 0.0)


def explain_device(cause: Cause, slowdown: float, devices: ComparedDevices) -> Explanation:
    """Return the reason why devices compute slowly, as far as their counters show it."""
    suspect, reason = devices.suspect, None
    lines = [*_clock_lines(devices), *_memory_lines(cause, devices)]
    needed = max(LEAST_DROP, EXPLAINED_PART * math.log(max(slowdown, 1.0)))
    if cause is Cause.MEMORY:
        return Explanation(Reason.MEMORY_BOUND, tuple(lines))
    if devices.clock_drop >= needed or (not suspect.clock_mhz > 0 and _throttles_alone(devices)):
        reason = Reason.DOWN_CLOCK
        lines += _heat_lines(devices)
    elif cause is Cause.COMPUTE and devices.clock_drop < needed and devices.memory_growth_mib >= LEAST_CONTEXT_MIB:
        reason = Reason.CONTENTION
    return Explanation(reason, tuple(lines))


def _throttles_alone(devices: ComparedDevices) -> tuple[str, ...]:
    """Return what throttles a suspect and not most of the others."""
    others = devices.typical_peer.throttles
    return tuple(name for name in devices.suspect.throttles if name not in others)


def _clock_lines(devices: ComparedDevices) -> list[str]:
    """Compare the clocks in words."""
    suspect, peer, before = devices.suspect, devices.typical_peer, devices.before
    limits = [name for name in THROTTLES if name in suspect.throttles]
    why = (
        f"; throttled by: {', '.join(limits)}" if limits else "; a lower clock is set for it" if suspect.is_set else ""
    )
    if not suspect.clock_mhz > 0:
        return [why.removeprefix("; ")] if limits else []
    known = sum(each.clock_mhz > 0 for each in devices.peers)
    median = f" (median of {devices.suspects} devices)" if devices.suspects > 1 else ""
    compared = [f"{_clock(peer.clock_mhz)} on {others_text(known, 'device')}"] if known else []
    compared += [f"{_clock(before.clock_mhz)} before"] if before.clock_mhz > 0 else []
    return [", ".join([f"SM clock{devices.name}{median} {_clock(suspect.clock_mhz)}", *compared]) + why]


def _heat_lines(devices: ComparedDevices) -> list[str]:
    """Compare temperature and power in words."""
    suspect, peer = devices.suspect, devices.typical_peer
    lines = []
    if is_known(suspect.temperature_c):
        others = f", {peer.temperature_c:.0f} °C on the others" if is_known(peer.temperature_c) else ""
        lines.append(f"temperature {suspect.temperature_c:.0f} °C{others}")
    if is_known(suspect.power_w):
        limit = f" of at most {suspect.power_limit_w:.0f} W" if is_known(suspect.power_limit_w) else ""
        others = f", {_power(peer)} on the others" if is_known(peer.power_w) else ""
        lines.append(f"power {suspect.power_w:.0f} W{limit}{others}")
    return lines


def _power(reading: DeviceReading) -> str:
    limit = f" of {reading.power_limit_w:.0f} W" if is_known(reading.power_limit_w) else ""
    return f"{reading.power_w:.0f} W{limit}"


def _memory_lines(cause: Cause, devices: ComparedDevices) -> list[str]:
    """Compare how much of the memory is in use, and how busy it is, in words."""
    suspect, peer = devices.suspect, devices.typical_peer
    lines = []
    if cause is Cause.MEMORY and is_known(suspect.memory_busy):
        others = f", {peer.memory_busy:.0%} on {others_text(_busy(devices), 'device')}" if _busy(devices) else ""
        lines.append(f"its memory was read or written {suspect.memory_busy:.0%} of the time{others}")
    if devices.memory_growth_mib >= LEAST_CONTEXT_MIB:
        growth, used = devices.memory_growth_mib, suspect.memory_mib
        than = " more than on the others" if devices.peers_before else ""
        lines.append(f"memory in use on the device has grown by {growth:.0f} MiB{than}, to {used:.0f} MiB")
    return lines


def _busy(devices: ComparedDevices) -> int:
    """Return the number of peers whose memory is known to be busy or not."""
    return sum(is_known(each.memory_busy) for each in devices.peers)


def _clock(megahertz: float) -> str:
    return f"{megahertz / MEGAHERTZ_PER_GIGAHERTZ:.2f} GHz"
