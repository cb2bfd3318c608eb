"""The trace record: 32 bytes, little endian, and the kinds of spans.

A record describes one *ended* span, or one sample of a metric. Its key is (attempt, step, kind, comm, ordinal)
for communication and (attempt, step, kind, chunk, microbatch) for compute; the attempt is in the ring's header
and in the agent's hello frame. With these keys matching between ranks is exact and needs no clock.
"""

import enum

import numpy as np

RECORD_BYTES = 32
DURATION_UNIT_NS = 8
"""Unit of durations, 8 ns: 32 bits reach 34 s."""
MAX_DURATION_UNITS = 0xFFFF_FFFF
PAIRS_UNIT = 1024
"""Unit of the pairs of tokens of a WORK record: 32 bits reach sequences of 2 million tokens."""
BYTES_UNIT = 16
"""Unit of a transfer's `aux`, 16 bytes: 32 bits reach 64 GiB."""
NO_COMM = 0xFFFF
NO_MICROBATCH = 0xFFFF
NO_LAYER = 0xFF
"""Layer of spans of the embedding, the final norm and the loss."""

RECORD = np.dtype(
    [
        ("start_ns", "<u8"),  # monotonic clock of the node (CLOCK_MONOTONIC)
        ("duration", "<u4"),  # in 8 ns; saturates with Flag.SATURATED
        ("step", "<u4"),  # one loop iteration, skipped updates included; counted from 0 over the whole job
        (
            "ordinal",
            "<u4",
        ),  # n-th message of this communicator, direction and step, which matches both ends; see also TIMED_KINDS
        ("aux", "<u4"),  # see the AUX_* flags
        ("comm", "<u2"),  # slot in the ring's communicator table, or NO_COMM
        ("microbatch", "<u2"),  # index within the step and rank, or NO_MICROBATCH
        ("kind", "u1"),
        ("chunk", "u1"),  # virtual pipeline stage on this rank
        ("layer", "u1"),  # layer of layer spans, or NO_LAYER; of COPY its TransferPath, of NCCL its NcclOperation
        ("flags", "u1"),
    ]
)


class RecordKind(enum.IntEnum):
    """Kind of a record. Numbers are part of the wire format: never reuse one."""

    STEP = 1
    """Whole loop iteration, from the data wait to the end of the optimizer."""
    DATA = 2
    """Wait for the next microbatch from the data loader."""
    FORWARD = 3
    BACKWARD = 4
    SEND_POST = 5
    """Posting a send; aux is its size."""
    SEND_WAIT = 6
    RECV_POST = 7
    RECV_WAIT = 8
    GRAD_REDUCE = 9
    """Gradient all-reduce or reduce-scatter over the data-parallel group."""
    PARAM_GATHER = 10
    """Parameter all-gather of the distributed optimizer."""
    EMBED_REDUCE = 11
    """Gradient all-reduce between first and last stage, and of sequence-parallel norms."""
    GRAD_NORM = 12
    OPTIMIZER = 13
    """The optimizer's own arithmetic."""
    LOSS_REDUCE = 14
    """Averaging the reported loss."""
    EVALUATE = 15
    CHECKPOINT = 16
    TP_REDUCE = 17
    """All-reduce or reduce-scatter over the tensor group within a pass; `ordinal` is that of `pass_ordinal`.

    In every step there is the first collective of each pass, in windows there are all of them.
    """
    TP_GATHER = 18
    """All-gather over the tensor group within a pass; like TP_REDUCE."""
    LAYER_FORWARD = 19
    """Part of a forward pass, in windows alone: `ordinal` is its LayerSite. Within BACKWARD it is recomputed."""
    LAYER_BACKWARD = 20
    """Part of a backward pass, from the gradient of its output to that of its input; like LAYER_FORWARD."""
    FAULT = 21
    """Injected fault; covers the time it added, so that a demonstration can be checked against the truth."""
    GC = 22
    WEIGHT = 23
    """Weight gradients of one microbatch and chunk, where they are computed apart from the rest of BACKWARD."""
    COPY = 24
    """A message on its way, copied by threads of the transport while its ranks run passes; aux is its size.

    Written by the receiver; the key is that of the message, and `layer` is its TransferPath.
    """
    PAUSE = 25
    """The training is paused by an order, between two steps."""
    CAPTURE = 26
    """Statistics of weights and gradients of a captured step. Passes of such a step are longer, on some ranks more than
    on others, so that a step with this span is no measure of anything.
    """
    PERTURB = 27
    """Begin of a perturbed step. Noise makes passes longer, on some ranks more than on others, so that a step with this
    span is no measure of anything.
    """
    STOPPED = 28
    """Time in which the process of the rank neither ran nor waited for a processor: it was stopped by a signal or a
    debugger, or with its control group or machine. It lies anywhere in the step, also across other spans.
    """
    WORK = 29
    """Note of the work of a microbatch, without a length: aux is its tokens (AUX_WORK), `ordinal` the pairs of tokens
    that attend to each other, in 1,024s. Written by the ranks that read data, where microbatches differ in shape.
    """
    NCCL = 30
    """A transfer of NCCL, from the begin of its kernel on this rank to its end; aux is its size, `layer` its
    NcclOperation. The kernel waits for the other ranks, so the transfer itself begins with the last one.
    """
    METRIC = 32
    """Sample of a metric: `comm` is a Metric, `aux` holds the bits of a 32-bit float, `start_ns` is its time."""
    COUNTER = 33
    """Sample of a host or device counter: `comm` is a Counter, `ordinal` the local device, `aux` as for METRIC."""


class Flag(enum.IntFlag):
    """Bits of a record's `flags`."""

    SATURATED = 1
    """Span longer than the duration field can hold."""
    AUX_BYTES = 2
    """aux is the size of the transfer in 16 bytes."""
    AUX_WORK = 4
    """aux is the work of a microbatch, in tokens."""
    AUX_RUN_QUEUE = 8
    """aux is the run-queue delay of the recording thread within the span, in 8 ns."""
    DEVICE_CLOCK = 16
    """Times of device events, mapped to the host clock."""
    SKIPPED_UPDATE = 32
    """The optimizer refused this step (found Inf in the gradients); only STEP records carry it."""
    INJECTED = 64
    """A fault was injected into this span."""
    AUX_LEAD = 128
    """aux is the lead of the host when the device ended the span, in 8 ns; near 0, the device waited for the host to
    launch its kernels."""


class PassFlag(enum.IntFlag):
    """Bits of `flags` that have a meaning of their own in records of PASS_KINDS."""

    EARLY = 32
    """The pass ran before its turn in the plan of its rank, while the planned one waited for its input."""


class LayerSite(enum.IntEnum):
    """Part of a model that layer spans time. Numbers are part of the wire format."""

    EMBEDDING = 1
    ATTENTION_NORM = 2
    """Norm in front of the attention of a layer."""
    ATTENTION = 3
    MLP_NORM = 4
    """Norm in front of the MLP of a layer."""
    MLP = 5
    FINAL_NORM = 6
    LOSS = 7
    """Output layer and cross entropy."""


class TransferPath(enum.IntEnum):
    """Path of a message that threads of the transport copy. Numbers are part of the wire format."""

    SHARED_MEMORY = 0
    """Memory of the host that both ranks map."""
    CUDA_IPC = 1
    """Memory of one device, written by the copy engine of another one of the node."""
    UCX = 2
    """Network, by UCX."""


class NcclOperation(enum.IntEnum):
    """Operation of an NCCL record. Numbers are part of the wire format."""

    OTHER = 0
    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    REDUCE = 5
    SEND = 6
    RECEIVE = 7


class Metric(enum.IntEnum):
    """Values of `comm` in METRIC records; the reporting rank writes one of each per step."""

    LOSS = 1
    LEARNING_RATE = 2
    GRAD_NORM = 3
    TOKENS_PER_SECOND = 4
    TFLOPS_PER_GPU = 5
    VALIDATION_LOSS = 6
    CONSUMED_SAMPLES = 7


class Counter(enum.IntEnum):
    """Values of `comm` in COUNTER records of a worker ring."""

    CPU_PRESSURE = 1
    """Share of time in which some task of the node waited for a processor (PSI), 0 to 1."""
    RANK_RUN_QUEUE = 2
    """Seconds per second that a rank's threads waited for a processor; ordinal is the local rank."""
    CPU_STEAL = 3
    """Share of the node's processor time that the host of its virtual machine gave to others, 0 to 1."""
    CPU_THROTTLED = 4
    """Seconds per second in which the limit of the worker's control group stopped its threads."""
    GPU_SM_CLOCK_MHZ = 16
    GPU_TEMPERATURE_C = 17
    GPU_POWER_W = 18
    GPU_THROTTLE_REASONS = 19
    GPU_UTILISATION = 20
    GPU_MEMORY_USED_MIB = 21
    GPU_MEMORY_CLOCK_MHZ = 22
    GPU_POWER_LIMIT_W = 23
    GPU_ECC_CORRECTED = 24
    """Memory errors that ECC has corrected since the driver was loaded."""
    GPU_ECC_UNCORRECTED = 25
    """Memory errors that ECC could not correct, since the driver was loaded."""
    GPU_PCIE_REPLAYS = 26
    """Transfers over PCIe that were repeated, since the device was reset."""
    GPU_MEMORY_UTILISATION = 27
    """Share of the time in which the device's memory was read or written, in percent."""


PASS_NUMBERS = {RecordKind.FORWARD: 0, RecordKind.BACKWARD: 1, RecordKind.WEIGHT: 2}
_COLLECTIVE_BITS, _CHUNK_BITS, _MICROBATCH_BITS = 12, 6, 12
PASS_KIND_SHIFT = _COLLECTIVE_BITS + _CHUNK_BITS + _MICROBATCH_BITS
"""Place of the number of the pass's kind in `pass_ordinal`."""
FIRST_COLLECTIVE_MASK = (1 << _COLLECTIVE_BITS) - 1
"""Bits of `pass_ordinal` that are 0 for the first collective of a kind in a pass."""


def pass_ordinal(kind: RecordKind, chunk: int, microbatch: int, number: int) -> int:
    """Return the ordinal of the collective `number` of its kind in a pass, equal on all ranks of the tensor group.

    So collectives match also between ranks that record different ones of a step. Each number is cut to its bits.
    """
    place = (PASS_NUMBERS[kind] << _MICROBATCH_BITS) | (microbatch & ((1 << _MICROBATCH_BITS) - 1))
    place = (place << _CHUNK_BITS) | (chunk & ((1 << _CHUNK_BITS) - 1))
    return (place << _COLLECTIVE_BITS) | (number & ((1 << _COLLECTIVE_BITS) - 1))


PASS_KINDS = frozenset({RecordKind.FORWARD, RecordKind.BACKWARD, RecordKind.WEIGHT})
TIMED_KINDS = PASS_KINDS | {RecordKind.STEP}
"""Kinds whose `ordinal`, where `aux` is a run-queue delay, is the time in which the recording thread was blocked or
stopped, in 8 ns: wall time less processor time less run-queue delay. A collective inside the pass and a page fault
block it. Rings of older releases have small running numbers there.
"""
COMPUTE_KINDS = PASS_KINDS | {RecordKind.OPTIMIZER}
P2P_KINDS = frozenset({RecordKind.SEND_POST, RecordKind.SEND_WAIT, RecordKind.RECV_POST, RecordKind.RECV_WAIT})
COLLECTIVE_KINDS = frozenset(
    {
        RecordKind.GRAD_REDUCE,
        RecordKind.PARAM_GATHER,
        RecordKind.EMBED_REDUCE,
        RecordKind.GRAD_NORM,
        RecordKind.LOSS_REDUCE,
        RecordKind.TP_REDUCE,
        RecordKind.TP_GATHER,
    }
)
