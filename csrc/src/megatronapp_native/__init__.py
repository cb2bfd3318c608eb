"""Trace ring in shared memory: one producer that never blocks, many readers that never see a torn record."""

from megatronapp_native._native import OpenSpan, RingInfo, RingReader, RingWriter, monotonic_ns, run_queue_ns
from megatronapp_native.errors import NativeError, RingError

__all__ = [
    "NativeError",
    "OpenSpan",
    "RingError",
    "RingInfo",
    "RingReader",
    "RingWriter",
    "monotonic_ns",
    "run_queue_ns",
]
