"""Observers of steps and transfers that record nothing; benches override what they measure."""

import contextlib
from typing import Any

from megatronapp_common.trace import RecordKind


class IgnoredTransfers:
    """A `TransferObserver` that records nothing."""

    def sending(self, *_transfer: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def withholds(self, _source: int) -> bool:
        return False

    def release_ns(self, copy: Any) -> int:  # noqa: ANN401 - ObservedCopy
        return int(copy.end_ns)

    def arrived(self, *_message: object) -> None:
        return None

    def part_arrived(self, *_message: object) -> None:
        return None

    def take(self, _target: object) -> None:
        return None


class IgnoredEvents:
    """A `StepObserver` that records nothing."""

    def __init__(self) -> None:
        self.transfers: Any = IgnoredTransfers()
        self.collectives = None

    def observes_parts(self, *, anywhere: bool) -> bool:
        return False

    def announcement(self) -> tuple[float, ...]:
        return ()

    def agreed(self, _sums: object) -> None:
        return None

    def wrap_transport(self, transport: Any) -> Any:  # noqa: ANN401 - Transport
        return transport

    def begin(self, kind: RecordKind, chunk: int, microbatch: int, *, early: bool = False) -> None:
        return None

    def end(self, kind: RecordKind) -> None:
        return None

    def step_begin(self, _step: int) -> None:
        return None

    def step_end(self, _metrics: object) -> None:
        return None

    def work(self, microbatch: int, *, tokens: int, pairs: int) -> None:
        return None

    def validation(self, _loss: float) -> None:
        return None

    def heartbeat(self) -> None:
        return None

    def close(self) -> None:
        return None
