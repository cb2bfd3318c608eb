"""Counters of host and devices, read from a pretended /proc and a pretended driver."""

import os
import pathlib
import struct
import sys
import time
import types
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.trace import RECORD, Counter, RecordKind
from megatronapp_native import RingReader
from megatronapp_trainer.launch.preflight import gpu_counters
from megatronapp_trainer.launch.preflight.gpu_counters import DeviceReader, visible_devices
from megatronapp_trainer.launch.reporting import counters
from megatronapp_trainer.launch.reporting.counters import CounterSampler, CounterThread, PressureReader, RunQueueReader

SECOND = 10**9


class NvmlError(Exception):
    """Error that the pretended driver raises."""


def driver(count: int = 2, broken: tuple[str, ...] = ()) -> types.SimpleNamespace:
    """A driver of `count` devices; functions named in `broken` fail."""

    def answer(name: str, value: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if name in broken:
                raise NvmlError(f"{name} is not supported")
            return value(*arguments) if callable(value) else value

        return call

    functions: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlDeviceGetCount": count,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": lambda name: name,
        "nvmlDeviceGetClockInfo": lambda handle, _which: 1000 + handle,
        "nvmlDeviceGetTemperature": 60,
        "nvmlDeviceGetPowerUsage": 350_500,
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0x28,
        "nvmlDeviceGetUtilizationRates": types.SimpleNamespace(gpu=97, memory=61),
        "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        "nvmlDeviceGetTotalEccErrors": lambda _handle, kind, counter: 10 * kind + counter,
        "nvmlDeviceGetPcieReplayCounter": 3,
        "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(used=5 * 2**30),
    }
    calls = {name: answer(name, value) for name, value in functions.items()}
    constants = {
        "NVML_CLOCK_SM": 1,
        "NVML_CLOCK_MEM": 2,
        "NVML_TEMPERATURE_GPU": 0,
        "NVML_MEMORY_ERROR_TYPE_CORRECTED": 0,
        "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
        "NVML_VOLATILE_ECC": 4,
    }
    return types.SimpleNamespace(NVMLError=NvmlError, **constants, **calls)


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2,0", [2, 0]),
        (" 1 , 3", [1, 3]),
        ("1,9,2", [1]),
        ("GPU-abc,1", ["GPU-abc", 1]),
        ("-1,0", []),
    ],
)
def test_visible_devices_are_those_of_cuda(variable: str | None, expected: list[int | str]) -> None:
    assert visible_devices(variable, 4) == expected


def test_devices_are_read_in_cudas_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver())
    reader = DeviceReader({"CUDA_VISIBLE_DEVICES": "1,0"})
    assert reader.count == 2
    samples = list(reader.sample())
    assert [value for counter, _, value in samples if counter is Counter.GPU_SM_CLOCK_MHZ] == [1001.0, 1000.0]
    assert (Counter.GPU_POWER_W, 1, 350.5) in samples
    assert (Counter.GPU_THROTTLE_REASONS, 0, 40.0) in samples
    assert (Counter.GPU_MEMORY_UTILISATION, 1, 61.0) in samples
    assert (Counter.GPU_MEMORY_USED_MIB, 0, 5120.0) in samples
    assert (Counter.GPU_ECC_CORRECTED, 0, 4.0) in samples
    assert (Counter.GPU_ECC_UNCORRECTED, 1, 14.0) in samples
    assert {counter for counter, _, _ in samples} == set(gpu_counters.READERS)


def test_counters_that_a_device_does_not_report_are_omitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver(broken=("nvmlDeviceGetPowerUsage",)))
    reader = DeviceReader({})
    assert {counter for counter, _, _ in reader.sample()} == set(gpu_counters.READERS) - {Counter.GPU_POWER_W}


def test_a_process_that_ends_while_its_threads_are_listed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(_path: object) -> None:
        raise ProcessLookupError(3, "No such process")

    (tmp_path / "7" / "task").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", ended)
        patch.setattr(os, "listdir", ended)
        assert RunQueueReader(7, tmp_path).read(SECOND) is None


def test_no_driver_means_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver(broken=("nvmlInit",)))
    reader = DeviceReader({})
    assert reader.count == 0
    assert list(reader.sample()) == []


def test_pressure_is_the_fraction_of_the_interval(tmp_path: pathlib.Path) -> None:
    (tmp_path / "pressure").mkdir()
    file = tmp_path / "pressure" / "cpu"
    pressure = PressureReader(tmp_path)
    assert pressure.read(0) is None
    file.write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=1000000\nfull avg10=0.00 total=7\n")
    assert pressure.read(5 * SECOND) is None
    file.write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=1500000\nfull avg10=0.00 total=7\n")
    assert pressure.read(7 * SECOND) == pytest.approx(0.25)


@given(st.text(max_size=40))
def test_pressure_of_any_text_is_a_number_or_an_error(text: str) -> None:
    try:
        assert isinstance(counters.pressure_total_us(text), int)
    except ValueError:
        return


def test_steal_is_a_fraction_of_the_time_of_all_processors(tmp_path: pathlib.Path) -> None:
    steal = counters.StealReader(tmp_path)
    assert steal.read() is None
    (tmp_path / "stat").write_text("cpu  100 0 100 700 0 0 0 100 50 0\ncpu0 1 2 3\n")
    assert steal.read() is None
    (tmp_path / "stat").write_text("cpu  150 0 150 750 0 0 0 150 90 0\ncpu0 1 2 3\n")
    assert steal.read() == pytest.approx(0.25)


def test_throttling_is_the_time_in_which_a_limit_stopped_the_group(tmp_path: pathlib.Path) -> None:
    throttle = counters.ThrottleReader(tmp_path)
    file = tmp_path / "cpu.stat"
    file.write_text("usage_usec 5\n")
    assert throttle.read(SECOND) is None
    file.write_text("usage_usec 5\nnr_throttled 2\nthrottled_usec 1000000\n")
    assert throttle.read(2 * SECOND) is None
    file.write_text("usage_usec 5\nnr_throttled 9\nthrottled_usec 1500000\n")
    assert throttle.read(4 * SECOND) == pytest.approx(0.25)


def thread(proc: pathlib.Path, name: str, wait_ns: int) -> None:
    folder = proc / "7" / "task" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "schedstat").write_text(f"123 {wait_ns} 9\n")


def test_run_queue_sums_over_threads_that_start_and_end(tmp_path: pathlib.Path) -> None:
    queue = RunQueueReader(7, tmp_path)
    assert queue.read(SECOND) is None
    thread(tmp_path, "7", 100)
    thread(tmp_path, "8", 900)
    assert queue.read(2 * SECOND) is None
    thread(tmp_path, "7", 100 + SECOND // 2)
    (tmp_path / "7" / "task" / "8" / "schedstat").unlink()
    thread(tmp_path, "9", SECOND // 4)
    assert queue.read(3 * SECOND) == pytest.approx(0.75)


def test_our_own_run_queue_can_be_read() -> None:
    queue = RunQueueReader(os.getpid())
    if not pathlib.Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel has no schedstat")
    queue.read(SECOND)
    delay = queue.read(2 * SECOND)
    assert delay is not None
    assert delay >= 0


@given(st.floats(width=32, allow_nan=False))
def test_float_bits(value: float) -> None:
    assert struct.unpack("<f", struct.pack("<I", counters.float_bits(value)))[0] == value


def test_thread_writes_and_closes_its_ring(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver(count=1))
    path = tmp_path / "worker.ring"
    sampler = CounterSampler(lambda: {0: os.getpid()}, DeviceReader({}))
    with CounterThread(path, attempt=3, metadata={"worker": 1}, sampler=sampler):
        reader = RingReader(str(path))
        while reader.info().head < len(gpu_counters.READERS):
            time.sleep(0.01)
    info = reader.info()
    assert (info.closed, info.attempt, info.metadata) == (True, 3, b'{"worker": 1}')
    records = np.frombuffer(reader.read(100)[0], RECORD)
    temperature = records[records["comm"] == Counter.GPU_TEMPERATURE_C][:1]
    assert temperature["kind"] == RecordKind.COUNTER
    assert temperature["aux"].view("<f4") == 60.0


def test_without_space_for_a_ring_there_are_no_counters(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = CounterSampler(dict, DeviceReader({}))
    with CounterThread(tmp_path / "missing" / "ring", attempt=0, metadata={}, sampler=sampler):
        pass
    assert "no counters of host and devices" in caplog.text
