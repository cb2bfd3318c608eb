"""Trace ring, recorder of a device, transport between ranks, replay of steps, merging and sums of their
records, and tests of the detector.

Ring: one producer that never blocks, many readers that never see a torn record. Transport: messages by key.
"""

from megatronapp_native._native import (
    PROGRESS_WORDS,
    ColumnTest,
    DeviceRecorder,
    OpenSpan,
    RingInfo,
    RingReader,
    RingWriter,
    StepReplay,
    StopMeter,
    TransportEndpoint,
    TransportMessage,
    interface_of,
    median_of_others,
    merge_by_rank,
    monotonic_ns,
    run_queue_ns,
    sum_spans,
    summarize_frame,
)
from megatronapp_native.errors import (
    DeviceError,
    DuplicateKeyError,
    NativeError,
    PeerLostError,
    RingError,
    TransferTimeoutError,
    TransportCorruptError,
    TransportError,
    TransportMismatchError,
)

__all__ = [
    "PROGRESS_WORDS",
    "ColumnTest",
    "DeviceError",
    "DeviceRecorder",
    "DuplicateKeyError",
    "NativeError",
    "OpenSpan",
    "PeerLostError",
    "RingError",
    "RingInfo",
    "RingReader",
    "RingWriter",
    "StepReplay",
    "StopMeter",
    "TransferTimeoutError",
    "TransportCorruptError",
    "TransportEndpoint",
    "TransportError",
    "TransportMessage",
    "TransportMismatchError",
    "interface_of",
    "median_of_others",
    "merge_by_rank",
    "monotonic_ns",
    "run_queue_ns",
    "sum_spans",
    "summarize_frame",
]
