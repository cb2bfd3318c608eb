class OpenSpan:
    """What a producer is inside of. `kind` is a Kind, `start_ns` is on the monotonic clock."""

    @property
    def kind(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def microbatch(self) -> int: ...
    @property
    def start_ns(self) -> int: ...

class RingInfo:
    """What a ring says about itself."""

    @property
    def attempt(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def head(self) -> int:
        """Records committed over the ring's life."""
    @property
    def overwritten(self) -> int:
        """Of those, how many the producer has replaced."""
    @property
    def closed(self) -> bool: ...
    @property
    def boot_id(self) -> str: ...
    @property
    def clock_id(self) -> int:
        """Clock of all times in the records, as clock_gettime numbers it."""
    @property
    def pid(self) -> int: ...
    @property
    def heartbeat_ns(self) -> int: ...
    @property
    def open_span(self) -> OpenSpan | None: ...
    @property
    def clock_pairs(self) -> list[tuple[int, int]]:
        """At most 8 pairs (monotonic, real time) in nanoseconds, oldest first."""
    @property
    def metadata(self) -> bytes: ...

class RingWriter:
    """The single producer of a ring file; one thread at a time. RingError if the file cannot be made whole."""

    def __init__(self, path: str, capacity: int, attempt: int, metadata: bytes) -> None: ...
    def record(
        self,
        start_ns: int,
        duration_ns: int,
        step: int,
        ordinal: int,
        aux: int,
        comm: int,
        microbatch: int,
        kind: int,
        chunk: int,
        layer: int,
        flags: int,
        /,
    ) -> None:
        """Append one ended span. A duration over 34 s saturates and sets Flag.SATURATED.

        OverflowError for a number that its field cannot hold.
        """
    def open_span(self, kind: int, step: int, microbatch: int, start_ns: int) -> None:
        """Show what this rank is inside of. Spans nest."""
    def close_span(self) -> None:
        """Leave the innermost open span; the one around it is shown again."""
    def heartbeat(self) -> None:
        """Store the present monotonic time, to a tick of the kernel (1 to 10 ms); record() does it too."""
    def clock_pair(self) -> None:
        """Store one more pair (monotonic, real time); the 8 newest are shown."""
    def close(self, unlink: bool) -> None:
        """Mark the ring closed; remove its file if asked. Nothing is recorded from then on."""

class RingReader:
    """One reader of a ring file, with its own position. RingError if the file is not a whole ring."""

    def __init__(self, path: str) -> None: ...
    def read(self, max_records: int) -> tuple[bytes, int]:
        """Whole 32-byte records in order, and how many were lost since the last call.

        RingError if the file has shrunk or its counts went back.
        """
    def info(self) -> RingInfo:
        """The header as it is now. RingError if the file has shrunk."""
    @property
    def next_index(self) -> int:
        """Index, in the ring's life, of the record that the next read would like to begin with."""
    def close(self) -> None:
        """Unmap the file; later calls raise RingError."""

def monotonic_ns() -> int:
    """CLOCK_MONOTONIC in nanoseconds."""

def run_queue_ns() -> int:
    """Nanoseconds that the calling thread waited for a processor since it began; 0 where the kernel does not tell."""
