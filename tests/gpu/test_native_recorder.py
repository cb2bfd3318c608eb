"""The native recorder on devices: lengths as torch's events measure them, no synchronisation, and who hangs."""

import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from megatronapp_analyzer.detect.hang_search import find
from megatronapp_analyzer.detect.settings import DetectorSettings
from megatronapp_analyzer.model import CurrentSpan, RankLiveness
from megatronapp_common.trace import RECORD, RecordKind

RunRanks = Callable[..., list[Any]]
LENGTHS_MS = (0.2, 1.0, 5.0, 20.0)
TOLERANCE_MS = 2e-3
HANG_S = 8.0


def recorder_of(path: pathlib.Path, rank: int) -> tuple[Any, Any]:
    """Return a recorder of the current stream and its ring's reader."""
    import torch

    import megatronapp_native as native
    from megatronapp_trainer.scan.device import DeviceRecorder

    torch.cuda.set_device(rank)
    torch.zeros(1, device="cuda")
    ring = native.RingWriter(str(path), 4096, 0, b"{}")
    recorder = DeviceRecorder(
        ring,
        native=native.DeviceRecorder(ring, rank),
        current_stream=lambda: torch._C._cuda_getCurrentRawStream(rank),
        monotonic_ns=native.monotonic_ns,
        run_queue_ns=native.run_queue_ns,
        on_length=lambda _kind, _flags, _own_ns: None,
    )
    return recorder, native.RingReader(str(path))


def tie_clocks(recorder: Any, steps: int) -> None:
    """Run steps at whose end the host waits for the device, as it does for the norm of the gradients."""
    import torch

    from megatronapp_trainer.scan.recorder import RecordKey

    for step in range(steps):
        recorder.begin_step(step)
        fields = RecordKey(RecordKind.GRAD_NORM)
        mark = recorder.enter(fields)
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        recorder.leave(fields, mark)


def timed_kernels(folder: str) -> list[tuple[float, float, float]]:
    """Return for each busy kernel the ms of torch's events inside the span, of the span, and of those around it."""
    import torch

    from megatronapp_trainer.scan.recorder import RecordKey
    from megatronapp_trainer.scan.stall import DeviceStall

    recorder, reader = recorder_of(pathlib.Path(folder, "rank0.ring"), 0)
    stall = DeviceStall()
    stall.calibrate()
    tie_clocks(recorder, 50)
    events = []
    recorder.begin_step(1000)
    torch.cuda.set_sync_debug_mode("error")
    for length_ms in LENGTHS_MS:
        fields = RecordKey(RecordKind.FORWARD)
        around = [torch.cuda.Event(enable_timing=True) for _ in range(4)]  # type: ignore[no-untyped-call]
        stall(5_000_000)  # so that the host is ahead, and launches do not lengthen what is measured
        around[0].record()
        mark = recorder.enter(fields)
        around[1].record()
        stall(round(length_ms * 1e6))
        around[2].record()
        recorder.leave(fields, mark)
        around[3].record()
        events.append(around)
    recorder.begin_step(1001)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    recorder.finish()
    records = np.frombuffer(reader.read(4096)[0], RECORD)
    spans = records[records["kind"] == RecordKind.FORWARD]
    assert len(spans) == len(LENGTHS_MS)
    return [
        (around[1].elapsed_time(around[2]), float(span["duration"]) * 8e-6, around[0].elapsed_time(around[3]))
        for around, span in zip(events, spans, strict=True)
    ]


def test_lengths_are_those_of_torchs_events_and_nothing_synchronises(
    run_ranks: RunRanks, tmp_path: pathlib.Path
) -> None:
    (rows,) = run_ranks(1, timed_kernels, str(tmp_path))
    for inside_ms, span_ms, around_ms in rows:
        assert inside_ms - TOLERANCE_MS <= span_ms <= around_ms + TOLERANCE_MS


def hang(folder: str) -> dict[str, Any]:
    """Reduce a tensor that rank 1 enters only after a kernel of HANG_S; return where host and device are meanwhile."""
    import torch
    import torch.distributed as dist

    from megatronapp_trainer.scan.recorder import RecordKey
    from megatronapp_trainer.scan.stall import DeviceStall

    dist.init_process_group("nccl")
    rank = dist.get_rank()
    recorder, reader = recorder_of(pathlib.Path(folder, f"rank{rank}.ring"), rank)
    value = torch.ones(1, device="cuda")
    dist.all_reduce(value)  # connects
    stall = DeviceStall()
    stall.calibrate()
    tie_clocks(recorder, 3)
    recorder.begin_step(7)
    backward = RecordKey(RecordKind.BACKWARD, microbatch=0)
    mark = recorder.enter(backward)
    stall(round(HANG_S * 1e9) if rank == 1 else 1_000_000)
    recorder.leave(backward, mark)
    reduce = RecordKey(RecordKind.GRAD_REDUCE)
    mark = recorder.enter(reduce)
    dist.all_reduce(value)
    recorder.leave(reduce, mark)
    norm = RecordKey(RecordKind.GRAD_NORM)
    mark = recorder.enter(norm)
    expected = RecordKind.BACKWARD if rank == 1 else RecordKind.GRAD_REDUCE
    deadline_s = time.monotonic() + HANG_S / 2
    while (info := reader.info()).device_span is None or info.device_span.kind != expected:
        assert time.monotonic() < deadline_s, f"rank {rank}: the device's span is {info.device_span}"
        time.sleep(0.01)
    found = {name: getattr(info, name).kind for name in ("open_span", "device_span")}
    torch.cuda.synchronize()
    recorder.leave(norm, mark)
    recorder.finish()
    dist.destroy_process_group()
    return found


@pytest.mark.gpus(2)
def test_the_rank_that_does_not_get_to_a_collective_is_named(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    now_ns = 10**12
    ranks = []
    for rank, found in enumerate(run_ranks(2, hang, str(tmp_path))):
        host, device = (
            CurrentSpan(kind=found[name], step=7, microbatch=0, start_ns=now_ns)
            for name in ("open_span", "device_span")
        )
        ranks.append(
            RankLiveness(
                rank=rank,
                alive=True,
                closed=False,
                heartbeat_ns=now_ns - 20 * 10**9,
                now_ns=now_ns,
                open_span=host,
                device_span=device,
            )
        )
    assert [rank.open_span.kind for rank in ranks if rank.open_span] == [RecordKind.GRAD_NORM] * 2
    culprit = find(ranks, 0.5, DetectorSettings())
    assert culprit is not None
    assert (culprit.culprits, culprit.victims, culprit.certain) == ((1,), (0,), True)
