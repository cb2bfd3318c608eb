"""What the agent needs of megatronapp_native, as protocols, so that it can be run without rings."""

from typing import Protocol


class NativeOpenSpan(Protocol):
    """See megatronapp_native."""

    @property
    def kind(self) -> int:
        """See megatronapp_native."""

    @property
    def step(self) -> int:
        """See megatronapp_native."""

    @property
    def microbatch(self) -> int:
        """See megatronapp_native."""

    @property
    def start_ns(self) -> int:
        """See megatronapp_native."""


class NativeRingInfo(Protocol):
    """See megatronapp_native."""

    @property
    def attempt(self) -> int:
        """See megatronapp_native."""

    @property
    def capacity(self) -> int:
        """See megatronapp_native."""

    @property
    def closed(self) -> bool:
        """See megatronapp_native."""

    @property
    def boot_id(self) -> str:
        """See megatronapp_native."""

    @property
    def pid(self) -> int:
        """See megatronapp_native."""

    @property
    def heartbeat_ns(self) -> int:
        """See megatronapp_native."""

    @property
    def open_span(self) -> NativeOpenSpan | None:
        """See megatronapp_native."""

    @property
    def clock_pairs(self) -> list[tuple[int, int]]:
        """See megatronapp_native."""

    @property
    def metadata(self) -> bytes:
        """See megatronapp_native."""


class RingReader(Protocol):
    """What the agent needs of megatronapp_native.RingReader."""

    def read(self, max_records: int) -> tuple[bytes, int]:
        """See megatronapp_native."""

    def info(self) -> NativeRingInfo:
        """See megatronapp_native."""

    @property
    def next_index(self) -> int:
        """See megatronapp_native."""

    def close(self) -> None:
        """See megatronapp_native."""
