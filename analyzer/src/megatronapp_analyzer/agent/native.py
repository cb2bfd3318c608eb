"""Protocols for the parts of megatronapp_native that the agent uses, so that tests can run it without rings."""

from typing import Protocol


class NativeOpenSpan(Protocol):
    """Span that a rank is inside of, as `megatronapp_native.OpenSpan`."""

    @property
    def kind(self) -> int: ...

    @property
    def step(self) -> int: ...

    @property
    def microbatch(self) -> int: ...

    @property
    def start_ns(self) -> int: ...


class NativeRingInfo(Protocol):
    """Header of a ring, as `megatronapp_native.RingInfo`."""

    @property
    def attempt(self) -> int: ...

    @property
    def capacity(self) -> int: ...

    @property
    def closed(self) -> bool: ...

    @property
    def boot_id(self) -> str: ...

    @property
    def pid(self) -> int: ...

    @property
    def heartbeat_ns(self) -> int: ...

    @property
    def open_span(self) -> NativeOpenSpan | None: ...

    @property
    def device_span(self) -> NativeOpenSpan | None: ...

    @property
    def clock_pairs(self) -> list[tuple[int, int]]: ...

    @property
    def metadata(self) -> bytes: ...


class RingReader(Protocol):
    """Reader of one ring, as `megatronapp_native.RingReader`."""

    def read(self, max_records: int) -> tuple[bytes, int]: ...

    def info(self) -> NativeRingInfo: ...

    @property
    def next_index(self) -> int: ...

    def close(self) -> None: ...
