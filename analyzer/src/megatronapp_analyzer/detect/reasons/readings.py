"""Typical counters of devices and hosts in a period, from samples of the rings of workers."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.detect.features import Floats
from megatronapp_common.trace import Counter

UNKNOWN = float("nan")
THROTTLES: Mapping[str, int] = {
    "power cap": 0x04,
    "hardware slowdown": 0x08,
    "thermal slowdown": 0x20,
    "hardware thermal slowdown": 0x40,
    "power brake": 0x80,
}
"""Bits of NVML for what lowers a clock below the one that is set; an idle device has none of them."""
SET_CLOCKS = 0x02
"""Bit of NVML for clocks that are set lower (application clocks)."""
MOSTLY = 0.5
"""Part of the samples in which a bit must be set to be mentioned."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CounterSamples:
    """Samples of one worker in a period: a row for each moment, NaN where a counter was not read."""

    columns: Mapping[tuple[int, int], int]
    """Column of each (counter, device); of counters of ranks, the local rank in place of the device."""
    values: Floats

    @functools.cached_property
    def _medians(self) -> Floats:
        return self._by_column(np.nanmedian)

    @functools.cached_property
    def _means(self) -> Floats:
        return self._by_column(np.nanmean)

    def _by_column(self, reduce: Callable[..., Floats]) -> Floats:
        """Reduce each column, of all at once; NaN for one without samples."""
        found: Floats = np.full(self.values.shape[1], UNKNOWN)
        known = np.isfinite(self.values).any(axis=0)
        if known.any():
            found[known] = reduce(self.values[:, known], axis=0)
        return found

    def median(self, counter: Counter, device: int = 0) -> float:
        """Return the median of a counter; NaN without samples."""
        column = self.columns.get((int(counter), device))
        return UNKNOWN if column is None else float(self._medians[column])

    def mean(self, counter: Counter, device: int = 0) -> float:
        """Return the mean of a counter; NaN without samples."""
        column = self.columns.get((int(counter), device))
        return UNKNOWN if column is None else float(self._means[column])

    def bits(self, counter: Counter, device: int) -> NDArray[np.int64]:
        """Return the samples of a counter whose values are bits."""
        column = self.columns.get((int(counter), device))
        found = np.empty(0) if column is None else self.values[:, column]
        return found[np.isfinite(found)].astype(np.int64)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeviceReading:
    """Medians of the counters of a device, or of several; NaN where they are unknown."""

    clock_mhz: float = UNKNOWN
    temperature_c: float = UNKNOWN
    power_w: float = UNKNOWN
    power_limit_w: float = UNKNOWN
    memory_mib: float = UNKNOWN
    """Memory that all processes use."""
    memory_busy: float = UNKNOWN
    """Part of the time in which the memory was read or written, 0 to 1."""
    throttles: tuple[str, ...] = ()
    """Names of the limits that lowered the clock most of the time."""
    is_set: bool = False
    """True if lower clocks were set most of the time."""

    @classmethod
    def of(cls, samples: CounterSamples, device: int) -> "DeviceReading":
        """Read a device of a worker."""
        bits = samples.bits(Counter.GPU_THROTTLE_REASONS, device)
        return cls(
            clock_mhz=samples.median(Counter.GPU_SM_CLOCK_MHZ, device),
            temperature_c=samples.median(Counter.GPU_TEMPERATURE_C, device),
            power_w=samples.median(Counter.GPU_POWER_W, device),
            power_limit_w=samples.median(Counter.GPU_POWER_LIMIT_W, device),
            memory_mib=samples.median(Counter.GPU_MEMORY_USED_MIB, device),
            memory_busy=samples.median(Counter.GPU_MEMORY_UTILISATION, device) / 100.0,
            throttles=tuple(name for name, bit in THROTTLES.items() if _is_mostly_set(bits, bit)),
            is_set=_is_mostly_set(bits, SET_CLOCKS),
        )

    @classmethod
    def typical(cls, readings: Sequence["DeviceReading"]) -> "DeviceReading":
        """Return the median of devices; of throttles, those of most of them."""
        return cls(
            clock_mhz=median(each.clock_mhz for each in readings),
            temperature_c=median(each.temperature_c for each in readings),
            power_w=median(each.power_w for each in readings),
            power_limit_w=median(each.power_limit_w for each in readings),
            memory_mib=median(each.memory_mib for each in readings),
            memory_busy=median(each.memory_busy for each in readings),
            throttles=tuple(
                name for name in THROTTLES if sum(name in each.throttles for each in readings) > len(readings) / 2
            ),
            is_set=sum(each.is_set for each in readings) > len(readings) / 2,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HostReading:
    """Means of the counters of a worker and of a rank of it, which are rates; NaN where they are unknown."""

    steal: float = UNKNOWN
    """Part of the node's processor time that a hypervisor gave to others."""
    throttled: float = UNKNOWN
    """Seconds per second in which the limit of the container stopped threads."""
    queued: float = UNKNOWN
    """Seconds per second in which threads of the rank waited for a processor."""

    @classmethod
    def of(cls, samples: CounterSamples, local_rank: int) -> "HostReading":
        """Read the host of a rank."""
        return cls(
            steal=samples.mean(Counter.CPU_STEAL),
            throttled=samples.mean(Counter.CPU_THROTTLED),
            queued=samples.mean(Counter.RANK_RUN_QUEUE, local_rank),
        )

    @classmethod
    def typical(cls, readings: Sequence["HostReading"]) -> "HostReading":
        """Return the median of hosts."""
        return cls(
            steal=median(each.steal for each in readings),
            throttled=median(each.throttled for each in readings),
            queued=median(each.queued for each in readings),
        )


def median(values: Iterable[float]) -> float:
    """Return the median of the values that are known; NaN without any."""
    known = [value for value in values if not math.isnan(value)]
    return float(np.median(known)) if known else UNKNOWN


def _is_mostly_set(bits: NDArray[np.int64], bit: int) -> bool:
    return len(bits) > 0 and bool(((bits & bit) != 0).mean() >= MOSTLY)
