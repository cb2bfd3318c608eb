"""Slow passes and late transfers of `gpu_dpp.py`."""

import contextlib
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from bench_device import BenchDevice
from ignored_events import IgnoredEvents

from megatronapp_common.trace import RecordKind
from megatronapp_trainer.parallel.transport import PostedTransfers, Transport
from megatronapp_trainer.pipeline.planning.tasks import RankTask

SLOWER, LATE_FRACTION, LATE_FORWARDS = 0.3, 0.05, 3.0
PASSES = (RecordKind.FORWARD, RecordKind.BACKWARD, RecordKind.WEIGHT)


class Disturber(IgnoredEvents):
    """A `StepObserver` that measures passes, and makes those of the first stage longer."""

    def __init__(self, device: BenchDevice, stall: Callable[[int], None], stage: int) -> None:
        """Take the rank's device, a function that keeps it busy for some nanoseconds, and its stage."""
        super().__init__()
        self.disturbance = "none"
        self.draw = random.Random(0)
        self.measures = False
        self.usual_s: dict[tuple[RecordKind, int], float] = {}
        self._device = device
        self._stall = stall
        self._stage = stage
        self._events: list[tuple[tuple[RecordKind, int], Any, Any]] = []
        self._side: Any = torch.cuda.Stream() if device.is_cuda else None  # type: ignore[no-untyped-call]
        self._open: tuple[tuple[RecordKind, int], Any] | None = None

    def begin(self, kind: RecordKind, chunk: int, microbatch: int, *, early: bool = False) -> None:
        """Begin a pass, and its measurement if there is one."""
        if kind in PASSES:
            self._open = (kind, chunk), self._device.mark() if self.measures else None

    def end(self, kind: RecordKind) -> None:
        """End a span: a slow rank's device stays busy for a share of its usual length."""
        if kind not in PASSES:
            return
        assert self._open is not None
        key, begun = self._open
        if self.measures:
            self._events.append((key, begun, self._device.mark()))
        if self.disturbance == "slow" and self._stage == 0:
            self._stall(round(1e9 * SLOWER * self.usual_s[key]))

    def learn(self) -> None:
        """Take the median length of each pass of the measured steps."""
        self._device.synchronize()
        lengths = defaultdict(list)
        for key, begun, ended in self._events:
            lengths[key].append(self._device.seconds(begun, ended))
        self.usual_s = {key: statistics.median(values) for key, values in lengths.items()}
        self._events, self.measures = [], False

    @contextlib.contextmanager
    def transfer(self, tensor: torch.Tensor | None, unit_s: float) -> Iterator[None]:
        """Within the context a transfer of the tensor begins, which may be late."""
        late = self.disturbance == "late" and tensor is not None and self.draw.random() < LATE_FRACTION
        if tensor is None or not late:
            yield
            return
        if self._side is None:
            self._stall(round(1e9 * LATE_FORWARDS * self.draw.random() * unit_s))
            yield
            return
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            self._stall(round(1e9 * LATE_FORWARDS * self.draw.random() * unit_s))
            yield
        tensor.record_stream(self._side)

    def wrap_transport(self, transport: Transport) -> Transport:
        """Return a transport over NCCL whose transfers may be late."""
        return LatePosts(transport, self)


UNIT_S = {"forward": 0.0}
"""Length of the forward pass of a stage with one chunk, by which transfers are late."""


class LatePosts:
    """megatron-core's transfers; all that a late call starts begin later."""

    def __init__(self, transport: Transport, disturber: Disturber) -> None:
        self._transport = transport
        self._disturber = disturber

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of the transport
        return getattr(self._transport, name)

    def post(self, **transfers: Any) -> PostedTransfers:  # noqa: ANN401 - of the transport
        sent = transfers["send_next"] if transfers["send_next"] is not None else transfers["send_prev"]
        with self._disturber.transfer(sent, UNIT_S["forward"]):
            return self._transport.post(**transfers)


class LateSends:
    """The native transport; a late message begins later."""

    def __init__(self, transport: Any, disturber: Disturber) -> None:  # noqa: ANN401 - of the schedule
        self._transport = transport
        self._disturber = disturber

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of the transport
        return getattr(self._transport, name)

    def send(self, target: RankTask, tensor: torch.Tensor) -> None:
        with self._disturber.transfer(tensor, UNIT_S["forward"]):
            self._transport.send(target, tensor)
