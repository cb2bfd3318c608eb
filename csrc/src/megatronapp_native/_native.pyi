from collections.abc import Sequence
from typing import TypedDict

from numpy import bool_, float64, int32, int64, uint8
from numpy.typing import ArrayLike, NDArray
from typing_extensions import Buffer

PROGRESS_WORDS: int
"""Number of progress words of a rank."""

class Traffic(TypedDict):
    """Transfers in one direction since ranks connected."""

    transfers: int
    bytes: int
    copy_ns: int

class PeerStatistics(TypedDict):
    """Transfers between this rank and one peer."""

    path: str
    sent: Traffic
    received: Traffic
    last: list[tuple[int, int, int, int, bool]]
    """At most 256, oldest first: key, bytes, start and end of the copy (monotonic, ns), whether sent by this rank."""

class TransportMessage(Buffer):
    """A received message: a view of its slot, writable, valid until it is released or no longer referenced.

    One in memory of a device has no buffer, but an address. A stream is the number by which torch names it
    (`torch.cuda.Stream.cuda_stream`).
    """

    def release(self, stream: int | None = None) -> None:
        """Give the slot back to the sender, who then overwrites it. A second call does nothing.

        With a stream: once all has ended that is enqueued there.
        """
    def wait(self, stream: int) -> None:
        """Let a stream of the device wait until the message is whole."""
    @property
    def complete(self) -> bool:
        """Whether the message is whole; raises the failure of a peer because of which it will never be."""
    @property
    def copied_ns(self) -> tuple[int, int] | None:
        """Start and end of the copy on the monotonic clock; None while they are not known."""
    @property
    def address(self) -> int: ...
    @property
    def released(self) -> bool: ...
    @property
    def peer(self) -> int:
        """The sender's rank."""
    @property
    def key(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def queued_ns(self) -> int:
        """When the sender was asked to send it, on the monotonic clock."""
    @property
    def start_ns(self) -> int:
        """When the sender began to copy, on the monotonic clock."""
    @property
    def end_ns(self) -> int: ...

def interface_of(address: str) -> str:
    """Return the network interface of this machine that has an address. Raises TransportError."""

class TransportEndpoint:
    """The transport of one rank. Add all peers, connect all ranks, then use it from any thread.

    Raises the errors of `megatronapp_native.errors`; in a forked child, TransportError. Keys are 64 bits and belong to
    one directed pair of ranks from `send` until the message is released.
    """

    def __init__(
        self,
        *,
        directory: str,
        job: str,
        attempt: int,
        rank: int,
        slot_bytes: int,
        slots: int,
        deadline_s: float,
        threads: int,
        device: int | None = None,
        pinned: bool = False,
    ) -> None:
        """Make this rank's board and remove the files of older attempts of the job.

        slot_bytes: the largest message. slots: unreleased messages of a directed pair of ranks. deadline_s: for peers
        to connect, and for a send to get a slot. threads: that copy. device: ordinal of the CUDA device from whose
        memory messages are sent and in whose memory they are received; without one that is host memory. pinned: with a
        device, let messages to other devices of the node pass through host memory, as those to ranks without a device
        and to other nodes do in any case; for devices that do not reach each other. Raises DeviceError.
        """
    def add_peer(self, peer: int, messages: bool) -> None:
        """Make the inbox for a peer's messages; without messages only progress words and logs are shared."""
    def open_network(self, *, library: str, devices: str) -> bytes:
        """Prepare for peers on other nodes; return the address with which they add this rank.

        library: path or name of UCX's libucp.so.0. devices: of the network, as UCX names them; empty: UCX chooses.
        """
    def add_remote_peer(self, peer: int, messages: bool, address: bytes) -> None:
        """Add a peer on another node, with memory for its messages."""
    def round_trip_ns(self, peer: int) -> int | None:
        """Return the shortest round trip to a peer on another node when ranks connected; None on this node."""
    def connect(self) -> None:
        """Wait until all peers have added and opened each other."""
    def send(self, peer: int, key: int, address: int, bytes: int, owner: object, stream: int | None = None) -> None:
        """Queue the memory at `address`; `owner` is kept alive until it is copied. Does not wait.

        With a stream of the device: copy it once all has ended that is enqueued there.
        """
    def send_parts(
        self,
        peer: int,
        key: int,
        parts: Sequence[tuple[int, int, int]],
        bytes: int,
        owner: object,
        stream: int | None = None,
    ) -> None:
        """Send one message of `bytes` bytes, gathered from parts: address, offset in the message, and bytes of each.

        Parts may be in any order and must not overlap; bytes that no part covers arrive with any value. Otherwise as
        `send`.
        """
    def poll(self, peer: int, key: int) -> TransportMessage | None:
        """Return the message if it has arrived."""
    def take_arrived(self, peers: Sequence[int]) -> list[TransportMessage]:
        """Return all messages of these peers that have arrived, in no order; raise a failure only if there are none."""
    def posted(self, peers: Sequence[int]) -> list[tuple[int, int]]:
        """Return sender and key of each message whose copy is enqueued on the sender's device and has not ended."""
    def poll_posted(self, peer: int, key: int) -> TransportMessage | None:
        """Return the message if it has arrived, or if its copy is enqueued on the sender's device."""
    def receive(self, peer: int, key: int, deadline_s: float) -> TransportMessage: ...
    def activity(self) -> int:
        """Return a number that changes with each message, log entry and failure."""
    def wait_activity(self, seen: int, deadline_s: float) -> bool:
        """Wait until `activity()` is not `seen`; return False at the deadline."""
    def sending(self) -> int:
        """Return how many sends are not copied yet."""
    def statistics(self, peer: int) -> PeerStatistics: ...
    def publish(self, index: int, value: int, stream: int | None = None) -> None:
        """Store one of this rank's 64-bit progress words; the last value wins.

        With a stream of the device: once all has ended that is enqueued there.
        """
    def read(self, peer: int, index: int) -> int:
        """Return a progress word of a peer; 0 before the first one."""
    def lead(self, followers: Sequence[int]) -> None:
        """Begin a log that these peers read."""
    def append(self, value: int, deadline_s: float) -> None:
        """Append 64 bits to the log; wait while a follower has not read the oldest of 1,024 entries."""
    def poll_entry(self, leader: int) -> int | None:
        """Return the next entry of a leader's log, if there is one; each once and in order."""
    def next_entry(self, leader: int, deadline_s: float) -> int: ...
    def close(self, drain: bool) -> None:
        """End all threads; with `drain`, wait first (within the deadline) until all queued messages have slots."""

class DeviceRecorder:
    """Recorder of spans of a CUDA stream: pooled events, read by a thread of its own, which writes the records.

    `begin`, `end`, `mark` and `record` belong to one thread and never wait; arguments by position only. A stream is the
    number by which torch names it. The thread also publishes in the ring which span the device is inside of.
    """

    def __init__(self, ring: RingWriter | None, device: int, library: str = "libcuda.so.1") -> None:
        """Read both clocks, waiting for the device. Without a ring, records are dropped.

        Raises RingError if a function of the driver fails.
        """
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
        """Queue one ended span of the host."""
    def begin(
        self,
        kind: int,
        step: int,
        microbatch: int,
        chunk: int,
        comm: int,
        ordinal: int,
        layer: int,
        flags: int,
        stream: int,
        /,
    ) -> int:
        """Begin a span. Returns its number, 0 if it was dropped because too many are pending."""
    def end(self, number: int, flags: int, is_anchor: bool, stream: int, /) -> None:
        """End a span and add `flags` to its flags.

        An anchor is an end at which the host has just waited for the device: at most 20 us are spent to tie the clocks.
        """
    def mark(
        self,
        kind: int,
        step: int,
        microbatch: int,
        chunk: int,
        comm: int,
        ordinal: int,
        layer: int,
        flags: int,
        stream: int,
        aux: int,
        /,
    ) -> None:
        """Record a span without a length, at the time at which the stream gets there."""
    def take_lengths(self) -> list[tuple[int, int, int]]:
        """Return (kind, flags, ns) of spans that were read since the last call."""
    def finish(self, timeout_ns: int) -> None:
        """End the thread, after at most `timeout_ns` for events that the device has not passed."""
    @property
    def dropped(self) -> int:
        """Spans and records that were dropped because too many were pending."""
    @property
    def failure(self) -> str:
        """Failure of the driver because of which nothing more is recorded; empty without one."""
    @property
    def uncertainty_ns(self) -> float:
        """By how many ns the newest time may be wrong against the host's clock."""

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
    def device_span(self) -> OpenSpan | None:
        """Span that the device is inside of while it has work; None otherwise, and for ranks without a device."""
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

class ColumnTest:
    """Tests columns (ranks, units, links) against their own levels and against peers that do the same work.

    A step has two halves: `compare`, then `judge`. The plain form is tests/support/traces/plain_references.py; results
    are equal to the last bit.
    """

    def __init__(
        self,
        peers: NDArray[int64],
        *,
        window: int,
        min_history: int,
        least_window: int,
        independent_tests: float,
        prior_errors: NDArray[float64],
    ) -> None:
        """Create columns; `peers` numbers those that do the same work, -1 for none.

        `window`: steps of a history of noise; `min_history`: steps from which on a level is used; `least_window`:
        shortest window that may be evidence; `independent_tests`: of each column, of which chance lets about one reach
        the limit; `prior_errors`: errors of the means over the windows before they are measured. ValueError for less
        than one test.
        """
    def grow(self, peers: NDArray[int64]) -> None:
        """Add columns for new peers. ValueError for fewer than before."""
    @property
    def memory_bytes(self) -> int:
        """Bytes of memory for what is learned of the columns."""
    def compare(
        self, values: NDArray[float64], limits: tuple[float, ...]
    ) -> tuple[NDArray[float64], NDArray[float64], NDArray[float64]]:
        """Begin a step: return the deviation of each column, its change relative to others, its distance from peers.

        `limits` are the seven of `ReferenceLimits`. ValueError where sizes do not fit.
        """
    def judge(
        self,
        shift: NDArray[float64],
        relative: NDArray[float64],
        shift_doubt: NDArray[float64],
        relative_doubt: NDArray[float64],
        usual: NDArray[bool_],
    ) -> tuple[NDArray[bool_], NDArray[bool_], NDArray[float64], NDArray[float64], NDArray[bool_], NDArray[bool_]]:
        """Judge the step and learn from it; return `known, over, size, strength, by_history, calm` by column.

        `shift` and `relative` are change and distance without what explains them otherwise, the doubts what these may
        be too large by; `usual`: columns that may be learned from. ValueError where sizes do not fit.
        """

class SpanFormat:
    """Numbers of the format of records that native functions of spans take."""

    def __init__(self, *, left_out: NDArray[bool_], step_kind: int, saturated_flag: int, run_queue_flag: int) -> None:
        """Create it. `left_out`: of 256 kinds those that are no entries of a rank's stream."""

class StepReplay:
    """Replays all steps of a job with some durations as recorded and all others as in an ideal step.

    An operation starts when all that it depends on has ended, and ends its duration later. Members of a group transfer
    together, once the last of them has started. Lists of lists are concatenated, with the places where each begins.
    """

    def __init__(
        self,
        *,
        dependency_begin: ArrayLike,
        dependencies: ArrayLike,
        group_begin: ArrayLike,
        members: ArrayLike,
        spans_replicas: ArrayLike,
        is_end: ArrayLike,
        recorded: ArrayLike,
        ideal: ArrayLike,
    ) -> None:
        """Prepare [operations, replicas, steps] of recorded seconds and [operations] of ideal ones.

        `spans_replicas` is 1 for a group that waits for the same group of all other replicas, `is_end` for an operation
        that the step lasts for. ValueError where sizes or indices do not fit, durations are not finite, or operations
        wait for each other in a circle.
        """
    def step_seconds(self, is_recorded: ArrayLike) -> NDArray[float64]:
        """Return seconds of [scenarios, steps] for flags of [scenarios, operations, replicas].

        1 takes the recorded duration, 0 the ideal one. ValueError if sizes do not fit.
        """

class StopMeter:
    """Measures when this process did not run without waiting for a processor: stopped by a signal or a debugger, in a
    frozen control group, or in a virtual machine that its host does not run.
    """

    def __init__(self, period_ns: int = 5_000_000) -> None:
        """Start the thread that measures. Stops shorter than the period are seen in proportion to it."""
    def take(self) -> list[tuple[int, int]]:
        """Return begin and end of the stops since the last call, in ns of the monotonic clock; at most 4,096."""
    def close(self) -> None:
        """End the thread, after a period at most."""

def latest_times(
    source: NDArray[int64],
    target: NDArray[int64],
    recorded: NDArray[float64],
    ideal: NDArray[float64],
    recorded_in: NDArray[uint8],
    initial: NDArray[float64],
    scenarios: int,
) -> NDArray[float64]:
    """Return the time of the last event in each of up to 8 scenarios, by the sums and maxima of `longest_paths`.

    An edge has its `recorded` weight in the scenarios whose bit of `recorded_in` is set, and its `ideal` weight in the
    others. Edges are in the order of `sort_by_level`; events that no edge leads to are at `initial`, and there is at
    least one event. ValueError where sizes or numbers do not fit.
    """

def longest_paths(
    source: NDArray[int64], target: NDArray[int64], weights: NDArray[float64], times: NDArray[float64]
) -> None:
    """Write to `times` [events, scenarios] the longest path to each event: the latest of source plus weight.

    Edges are in the order of `sort_by_level`, `weights` is [edges, scenarios]; events that no edge leads to stay as
    they are. ValueError where sizes or numbers do not fit.
    """

def match_messages(
    rows: NDArray[uint8], numbers: NDArray[int64], pairs: NDArray[int64], kinds: Sequence[int]
) -> tuple[
    NDArray[int64],
    NDArray[int64],
    NDArray[int64],
    NDArray[int64],
    NDArray[int64],
    NDArray[int64],
    NDArray[int64],
]:
    """Match the rows of messages; return source, destination, ordinal, and the row of each of four parts, -1 without.

    `rows` are the bytes of records with their ranks, `numbers` those of communicators by [rank, slot], `pairs` has the
    source and destination of each number, -1 for what is no directed pair. `kinds` are of the four parts. Messages are
    sorted by number, then ordinal; of several rows of a part the last is taken. ValueError where sizes do not fit.
    """

def column_medians(table: NDArray[float64]) -> NDArray[float64]:
    """Return the lower median of what is not NaN in each column; NaN for a column of nothing else."""

def row_medians(table: NDArray[float64]) -> NDArray[float64]:
    """Return the median of what is not NaN in each row, the mean of two middles; NaN for a row of nothing else."""

def shortest_transfers(
    rows: NDArray[uint8], send: NDArray[int64], receive: NDArray[int64], clock_of: NDArray[int64]
) -> tuple[NDArray[int64], NDArray[int64]]:
    """Return the way of each run of messages between the same clocks, and its shortest time from post to receipt in ns.

    A way is the number of the sender's clock times the number of clocks, plus that of the receiver's; it may have
    several runs. Messages without both rows are left out. ValueError for rows and ranks that are none.
    """

def segment_medians(groups: NDArray[int64], values: NDArray[float64], count: int) -> NDArray[float64]:
    """Return the lower median of the values of each of `count` groups; NaN for a group without any.

    NaN is above all numbers. ValueError for a group that is none of these.
    """

def shift_starts(
    rows: NDArray[uint8],
    offset_ns: NDArray[int64],
    device_ns: NDArray[int64],
    device_flag: int,
    host_kinds: NDArray[bool_],
) -> NDArray[uint8]:
    """Return a copy of rows with the offset of their rank subtracted from their starts.

    From those with the flag of a device's clock, `device_ns` of their rank, too, but for the `host_kinds`. ValueError
    for ranks without an offset, and where sizes do not fit.
    """

def span_columns(
    rows: NDArray[uint8], origin_ns: int, format: SpanFormat
) -> tuple[
    NDArray[float64],
    NDArray[float64],
    NDArray[float64],
    NDArray[float64],
    NDArray[int64],
    NDArray[uint8],
    NDArray[uint8],
]:
    """Return start, end, duration and run-queue delay of spans in seconds, their ranks, kinds and flags.

    Starts are after `origin_ns`, and no two spans of a rank overlap. `rows` are sorted by rank, then start.
    """

def summarize_rows(
    rows: NDArray[uint8],
) -> tuple[NDArray[uint8], NDArray[int32], NDArray[int64], int, int, int]:
    """Return the kind and the rank of each row, and of all rows: the number of each kind, flags, greatest rank, start.

    The flags are those that some row has. Without rows the rank is -1, and the least start the largest number.
    """

def take_rows(rows: NDArray[uint8], numbers: NDArray[int64]) -> NDArray[uint8]:
    """Return copies of rows by their numbers. ValueError for a number of no row."""

def set_threads(count: int, least_items: int = 65536) -> None:
    """Allow functions of the detector up to `count` threads, the caller's included; 1 at first.

    Each of them works on `least_items` rows or more. Python threads that call such functions at once share them.
    Results are the same for any number. ValueError for 0.
    """

def stream_rows(rows: NDArray[uint8], format: SpanFormat) -> tuple[NDArray[int64], bool]:
    """Return the rows that are entries of their rank's stream, and whether they are sorted by rank, then start."""

def sort_by_level(
    source: NDArray[int64], target: NDArray[int64], events: int
) -> tuple[NDArray[int64], NDArray[int64], int]:
    """Return the order of edges by level of the target, then target; where each level begins; how many events have one.

    A level is the number of edges on the longest way to an event; events in a circle have none, and the order is empty
    then. ValueError where sizes or numbers do not fit.
    """

def median_of_others(values: NDArray[float64], groups: NDArray[int64]) -> NDArray[float64]:
    """Return for each finite value the lower median of the other finite ones of its group, NaN for all others.

    Groups are numbered from -1 on. ValueError where sizes do not fit.
    """

def merge_by_rank(parts: list[tuple[int, NDArray[uint8]]], rows: NDArray[uint8]) -> None:
    """Write the records of `parts` to `rows`, sorted by rank, then start; equal ones stay in order.

    `parts` has ranks and bytes of their records, `rows` takes the bytes of each record and its rank (int32). ValueError
    where sizes do not fit.
    """

def summarize_frame(records: NDArray[uint8] | bytes) -> tuple[int, int, int]:
    """Return the least and greatest step of whole records, and a bit for each kind among them.

    Kinds from 63 on have the last bit. ValueError where it is no record, or not whole ones.
    """

def sum_spans(
    rows: NDArray[uint8], columns_of_kind: bytes, busy: int, run_queue_flag: int, sums: NDArray[float64]
) -> None:
    """Write the seconds of spans to `sums` [column][rank], from rows of `merge_by_rank`.

    `columns_of_kind` has, for each of 256 kinds, a bit for each column that adds it up, `busy` a bit for each column
    without run-queue delays, which are the `aux` of records with `run_queue_flag`. Ranks that `sums` lacks are skipped.
    ValueError where sizes do not fit, and for more than 8 columns.
    """

def monotonic_ns() -> int:
    """CLOCK_MONOTONIC in nanoseconds."""

def run_queue_ns() -> int:
    """Nanoseconds that the calling thread waited for a processor since it began; 0 where the kernel does not tell."""
