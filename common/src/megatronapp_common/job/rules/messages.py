"""Rules about what MegaDPP needs to send messages: memory, the order's activations, GPUs on one node.

The arithmetic is that of `job.inbox_memory`, in CEL. Rules see, besides the names of `world`, `cap` (microbatches of
memoryCap; 0 without it, -1 for bytes), `microbatches` (of a step), `planned` and `peak` (most chunks whose
activations a rank keeps, in the static order and in all). Bytes are floating-point numbers, because their product may
exceed 64 bits. The cap is converted once: Kubernetes 1.30 takes its text to be long, and limits the cost of all rules.
"""

import re
from collections.abc import Iterator

from megatronapp_common.job.inbox_memory import FILE_BYTES, MAX_SLOTS, SLOT_BYTES, SPARE_CHUNKS_OF_BYTES, SPARE_DIVISOR
from megatronapp_common.job.rules.model import GIVEN_CHUNKS, SEQUENCE, STAGES, TENSOR, VEE
from megatronapp_common.job.rules.rule import Rule, cel_message, cel_message_with, let
from megatronapp_common.job.rules.world import REPLICAS, cel_message_with_sizes, with_gang

_ON = f"(self.dpp.enabled && {STAGES} > 1)"
_SHM, _LIMITS, _CAP = "self.shm.sizeLimit", "self.resources.limits", "self.dpp.memoryCap"
_MEMORY = f"{_LIMITS}['memory']"
_BATCH, _MICRO = "self.training.globalBatchSize", "self.training.microBatchSize"
_SCHEDULE = "(has(self.dpp.schedule) ? self.dpp.schedule : 'auto')"
_FREE = f"{_SCHEDULE} in ['dfc', 'bfc']"


def _least(first: str, second: str) -> str:
    """Return CEL text of the smaller one of two values."""
    return f"({first} < {second} ? {first} : {second})"


def _least_with_cap(unless: str) -> str:
    """Return CEL text of the microbatches that a cap admits of a step; `unless`: the cap where none is written."""
    return _least(f"(cap > 0 ? cap : {unless})", "microbatches")


_WARM_UP = f"({GIVEN_CHUNKS} == 1 ? {STAGES} - 1 : 2 * ({STAGES} - 1) + ({GIVEN_CHUNKS} - 1) * {STAGES})"
_SPARE = f"(cap < 0 ? {SPARE_CHUNKS_OF_BYTES} : planned < {2 * SPARE_DIVISOR} ? 1 : planned / {SPARE_DIVISOR})"
_AUTO = (
    f"(cap > 0 ? {_least_with_cap('0')} * {GIVEN_CHUNKS} : "
    f"{_least(f'planned + {_SPARE}', f'microbatches * {GIVEN_CHUNKS}')})"
)
_NAMES = (
    ("cap", f"!has({_CAP}) ? 0 : string({_CAP}).endsWith('i') ? -1 : int(string({_CAP}))"),
    ("microbatches", f"has({_BATCH}) ? {_BATCH} / {_MICRO} / {REPLICAS} : 1"),
    ("planned", _least(f"{_WARM_UP} + 1", f"microbatches * {GIVEN_CHUNKS}")),
    (
        "peak",
        f"{_FREE} ? {_least_with_cap(STAGES)} * {GIVEN_CHUNKS} : {VEE} ? {_least(f'2 * {STAGES}', '2 * microbatches')} "
        f": {_SCHEDULE} != 'auto' || {_AUTO} < planned ? planned : {_AUTO}",
    ),
)
_SLOTS = f"({_least('peak', str(MAX_SLOTS))} * ({GIVEN_CHUNKS} == 1 ? 1 : 2) + 2)"
_STRIDE = f"nodes * per_node / {STAGES}"
_RING = f"(nodes == 1 && {GIVEN_CHUNKS} > 1 && !{VEE} && {STAGES} > 2 ? 2 * ({_STRIDE}) : 0)"
_INBOXES = f"((nodes * per_node / {STAGES} < per_node ? 2 * (per_node - nodes * per_node / {STAGES}) : 0) + {_RING})"
_NUMBER = "(self.training.precision == 'bf16' ? 2.0 : 4.0)"
_MESSAGE = (
    f"double(self.model.seqLength / ({SEQUENCE} ? {TENSOR} : 1)) * double({_MICRO}) * "
    f"double(self.model.hiddenSize) * {_NUMBER}"
)
_NEEDED = (
    f"(double({_INBOXES} * {_SLOTS}) * ({_MESSAGE} + {SLOT_BYTES}.0) + "
    f"double(per_node * {TENSOR} + {_INBOXES}) * {FILE_BYTES}.0)"
)
"""CEL text over the names above: bytes in /dev/shm of a worker, `inbox_memory.inbox_bytes`."""
_SIZES = (
    "--seq-length",
    "--hidden-size",
    "--micro-batch-size",
    "--global-batch-size",
    "--dpp-schedule",
    "--dpp-memory-cap",
    "--bf16",
    "--sequence-parallel",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
)


def _used(text: str) -> Iterator[tuple[str, str]]:
    """Yield the names that a text needs, innermost first."""
    for name, value in reversed(_NAMES):
        if re.search(rf"(?<![.\w]){name}\b", text):
            yield name, value
            text += value


def _of_messages(rule_id: str, field: str, rule: str, *, unless: str, summary: str, message: str) -> Rule:
    """Return a rule over the names above; it passes without MegaDPP, where the gang's numbers disagree, `unless`."""
    text = cel_message(message)
    for name, value in _used(message):
        text = cel_message_with(name, value, text)
    for name, value in _used(rule):
        rule = let(name, value, rule)
    return Rule(
        id=rule_id,
        field=field,
        rule=f"!{_ON} || {unless} || {with_gang(rule)}",
        message=summary,
        message_expression=cel_message_with_sizes(text),
        args=_SIZES,
    )


def _bytes_of(quantity: str) -> str:
    return f"quantity(string({quantity})).asApproximateFloat()"


_ON_GPUS = "self.gpusPerNode > 0"
"""Slots are in memory of the devices, and only where these do not reach each other in /dev/shm, as the start finds."""
_SMALLER = "or a smaller training.microBatchSize or dpp.memoryCap"
_SPACE = f"{{{_INBOXES}}} x {{{_SLOTS}}} messages of {{int({_MESSAGE})}} bytes"
_LEAST_CAP = f"{{(planned + {GIVEN_CHUNKS} - 1) / {GIVEN_CHUNKS}}}"

MESSAGE_RULES = (
    Rule(
        id="dpp-gpus-on-one-node",
        field=".nodes",
        rule=f"!{_ON} || !({_ON_GPUS}) || {with_gang('nodes == 1')}",
        message="must be 1 with dpp.enabled and GPUs: messages between the GPUs of a pipeline stay on a node; "
        "write nodes: 1, gpusPerNode: 0 for the CPU, or leave dpp out",
        message_expression=cel_message_with_sizes(
            cel_message(
                "GPUs of a pipeline are on {nodes} nodes, and messages of dpp between GPUs stay on one; "
                "write nodes: 1, gpusPerNode: 0 for the CPU, or leave dpp out"
            )
        ),
    ),
    _of_messages(
        "cap-of-static-order",
        ".dpp.memoryCap",
        f"cap <= 0 || cap >= (planned + {GIVEN_CHUNKS} - 1) / {GIVEN_CHUNKS}",
        unless=f"!has({_CAP}) || {_SCHEDULE} != 'auto'",
        summary="is below what the first stage keeps in the static order; write more, or leave it out",
        message=f"{{{_CAP}}} is too small: the first stage keeps the activations of {_LEAST_CAP} microbatches even in "
        f"the static order; write {_LEAST_CAP} or more, or schedule: dfc",
    ),
    _of_messages(
        "slots-of-messages",
        ".dpp",
        f"{_SLOTS} <= {MAX_SLOTS}",
        unless="false",
        summary=f"needs more than {MAX_SLOTS} slots for messages from each neighbour; write a smaller memoryCap",
        message="keeps activations of {peak} chunks at a time, which need more than "
        f"{MAX_SLOTS} slots for messages from each neighbour; write a smaller memoryCap, or fewer chunks",
    ),
    _of_messages(
        "messages-within-shm",
        ".shm.sizeLimit",
        f"{_SLOTS} > {MAX_SLOTS} || {_NEEDED} <= {_bytes_of(_SHM)}",
        unless=f"!has({_SHM}) || {_ON_GPUS}",
        summary="is too small for the messages of dpp between the ranks of a worker; leave it out, or write more",
        message=f"{{{_SHM}}} is too small: dpp needs space for {_SPACE}; leave sizeLimit out, write more, {_SMALLER}",
    ),
    _of_messages(
        "messages-within-memory",
        ".resources.limits",
        f"{_SLOTS} > {MAX_SLOTS} || {_NEEDED} < {_bytes_of(_MEMORY)}",
        unless=f"has({_SHM}) || !('memory' in {_LIMITS}) || {_ON_GPUS}",
        summary="has too little memory for the messages of dpp between the ranks of a worker, in /dev/shm; write more",
        message=f"memory {{{_MEMORY}}} is too small: dpp needs space for {_SPACE} in /dev/shm, which is "
        f"charged to it; write more, {_SMALLER}",
    ),
)
"""Rules about spec.dpp that need the sizes of the model and the gang."""
