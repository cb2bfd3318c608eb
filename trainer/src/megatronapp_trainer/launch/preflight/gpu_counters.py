"""GPU counters through NVML, if its driver is installed."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatronapp_common.trace import Counter

log = logging.getLogger(__name__)

MILLIWATT_PER_WATT = 1000.0
BYTES_PER_MIB = 1024.0 * 1024.0


def visible_devices(variable: str | None, count: int) -> list[int | str]:
    """Return indices or UUIDs of the devices that CUDA shows, in order; like CUDA, up to the first missing one."""
    if variable is None:
        return list(range(count))
    found: list[int | str] = []
    for entry in variable.split(","):
        name = entry.strip()
        if name.isdigit() and int(name) < count:
            found.append(int(name))
        elif name.startswith(("GPU-", "MIG-")):
            found.append(name)
        else:
            break
    return found


class DeviceReader:
    """Reads the devices that are visible to the ranks of this worker; without a driver there are no devices."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        self._silent: set[Counter] = set()
        try:
            import pynvml
        except ImportError:
            log.info("no GPU counters: nvidia-ml-py is not installed")
            return
        try:
            pynvml.nvmlInit()
            names = visible_devices(environment.get("CUDA_VISIBLE_DEVICES"), pynvml.nvmlDeviceGetCount())
            self._handles = [_handle(pynvml, name) for name in names]
        except pynvml.NVMLError as error:
            log.info("no GPU counters: %s", error)
            return
        self._nvml = pynvml

    @property
    def count(self) -> int:
        """Return the number of devices that are read."""
        return len(self._handles)

    def sample(self) -> Iterator[tuple[Counter, int, float]]:
        """Yield counter, device and value of each device; a counter that a device lacks is logged once and skipped."""
        for index, handle in enumerate(self._handles):
            for counter, read in READERS.items():
                value = self._try(counter, read, handle)
                if value is not None:
                    yield counter, index, value

    def _try(self, counter: Counter, read: Callable[[Any, Any], float], handle: Any) -> float | None:  # noqa: ANN401
        try:
            return float(read(self._nvml, handle))
        except self._nvml.NVMLError as error:
            if counter not in self._silent:
                self._silent.add(counter)
                log.info("%s is not counted: %s", counter.name, error)
            return None


def _handle(nvml: Any, name: int | str) -> Any:  # noqa: ANN401 - untyped library
    if isinstance(name, int):
        return nvml.nvmlDeviceGetHandleByIndex(name)
    return nvml.nvmlDeviceGetHandleByUUID(name)


def _ecc_errors(nvml: Any, handle: Any, *, corrected: bool) -> float:  # noqa: ANN401 - untyped library
    kind = nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED if corrected else nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    return float(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC))


READERS: dict[Counter, Callable[[Any, Any], float]] = {
    Counter.GPU_SM_CLOCK_MHZ: lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
    Counter.GPU_TEMPERATURE_C: lambda nvml, handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
    Counter.GPU_POWER_W: lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle) / MILLIWATT_PER_WATT,
    Counter.GPU_THROTTLE_REASONS: lambda nvml, handle: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    Counter.GPU_UTILISATION: lambda nvml, handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
    Counter.GPU_MEMORY_UTILISATION: lambda nvml, handle: nvml.nvmlDeviceGetUtilizationRates(handle).memory,
    Counter.GPU_MEMORY_USED_MIB: lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle).used / BYTES_PER_MIB,
    Counter.GPU_MEMORY_CLOCK_MHZ: lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
    Counter.GPU_POWER_LIMIT_W: lambda nvml, handle: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / MILLIWATT_PER_WATT,
    Counter.GPU_ECC_CORRECTED: lambda nvml, handle: _ecc_errors(nvml, handle, corrected=True),
    Counter.GPU_ECC_UNCORRECTED: lambda nvml, handle: _ecc_errors(nvml, handle, corrected=False),
    Counter.GPU_PCIE_REPLAYS: lambda nvml, handle: nvml.nvmlDeviceGetPcieReplayCounter(handle),
}
"""NVML call and unit conversion of each counter."""
