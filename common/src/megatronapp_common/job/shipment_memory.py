"""Shared memory that the messages of MegaFBD need, from a manifest: an upper bound of what the trainer finds.

The trainer learns from one pass what autograd saves, and refuses too little memory at the start.
`tests/unit/trainer/fbd/test_shipment_memory.py` compares the bound of a pass with what passes save.
"""

import math

from megatronapp_common.job.api.model import Model
from megatronapp_common.job.api.spec import Spec
from megatronapp_common.job.inbox_memory import FILE_BYTES, SLOT_BYTES, chunks_of
from megatronapp_common.job.megatron_job import MegatronJob
from megatronapp_common.job.world import WorkerGroup
from megatronapp_common.topology import RankRole

CONTROL_SLOTS = 16
WEIGHT_PART_BYTES = 4 << 20
"""Size of the messages that carry weights."""
SPARE_PLACES, FEWEST_PLACES = 2, 3
"""Passes that a backward rank has room for beyond those of the static order, and at least."""
UNKNOWN_VOCABULARY = 131_072
"""Tokens where the manifest names none, as they are the tokenizer's."""
OTHER_BYTES = 64 << 10
"""Upper bound of what a pass saves besides layers and logits: random states, statistics, tables."""


def shipment_bytes(job: MegatronJob, group: WorkerGroup) -> int:
    """Return an upper bound of the shared memory for messages on a worker of a group; 0 without MegaFBD.

    Messages to and from other workers take none, and of ranks with GPUs only control words are in it. Flags in
    spec.args are not read.
    """
    spec, fbd = job.spec, job.world.fbd
    if fbd is None or spec.model is None or spec.training is None or group.gpus_per_node:
        return 0
    control = _control_slots(job) * (max(_hidden_bytes(spec), WEIGHT_PART_BYTES) + SLOT_BYTES) + FILE_BYTES
    saved = _places(job) * (pass_bytes(spec) + (_layers(spec) + 2) * SLOT_BYTES) + FILE_BYTES
    neighbours = 2 * control if spec.parallelism.pipeline > 1 else 0
    each = neighbours + 2 * FILE_BYTES
    if group.role is not RankRole.ALL:
        return group.proc_per_node * each
    units = math.ceil(group.proc_per_node / (fbd.served + 1))
    return group.proc_per_node * each + units * 2 * fbd.served * (control + saved)


def pass_bytes(spec: Spec) -> int:
    """Return an upper bound of the messages with the tensors that one pass of a chunk saves.

    Messages are of one size, that of the largest group of tensors (a layer, or the logits), and two that follow each
    other hold more than that together. The counts of a layer are those of the layers of torch and megatron-core, each
    tensor that an operation may save counted once.
    """
    model, training = spec.model, spec.training
    assert model is not None and training is not None
    tokens = model.seq_length * training.micro_batch_size
    layer = tokens * _layer_bytes(spec, model)
    logits = 5 * tokens * -(-_vocabulary(model) // spec.parallelism.tensor) + 2 * _hidden_bytes(spec)
    largest = max(layer, logits) + OTHER_BYTES
    count = _layers(spec)
    return min((count + 2) * largest, 2 * (count * layer + logits + OTHER_BYTES) + largest)


def _layer_bytes(spec: Spec, model: Model) -> int:
    """Return the bytes that a layer saves for each token of a microbatch."""
    hidden, heads, tensor = model.hidden_size, model.num_attention_heads, spec.parallelism.tensor
    width = model.kv_channels or hidden // heads
    query, keys = heads * width, (model.num_query_groups or heads) * width
    inner = model.ffn_hidden_size or 4 * hidden
    divided = 2 * (query + 2 * keys) + 2 * query + 5 * inner
    if model.transformer_impl == "local":
        divided += 4 * heads * model.seq_length
    in_fp32 = 8 * hidden + (query + keys) // tensor  # norms and rotary positions, in bf16 too
    return 4 * in_fp32 + -(-divided // tensor) * _number_bytes(spec) + 16 * heads


def _control_slots(job: MegatronJob) -> int:
    """Return the messages of a peer, but shipments, for which a rank has room; more where ranks choose their order."""
    fbd = job.world.fbd
    if fbd is None or not job.spec.dpp.enabled or job.spec.dpp.schedule == "static":
        return CONTROL_SLOTS
    return max(CONTROL_SLOTS, fbd.backward_per_forward * _places(job) + 1)


def _places(job: MegatronJob) -> int:
    """Return the most passes that a backward rank has room for."""
    layout, training = job.spec.parallelism, job.spec.training
    assert training is not None
    chunks, stages, replicas = chunks_of(job.spec), layout.pipeline, job.world.data_parallel_size
    samples = training.global_batch_size or training.micro_batch_size * replicas
    passes = samples // training.micro_batch_size // replicas * chunks
    if job.spec.dpp.schedule in {"dfc", "bfc"}:
        return min((stages + -(-SPARE_PLACES // chunks)) * chunks, passes)
    warm_up = stages - 1 if chunks == 1 else 2 * (stages - 1) + (chunks - 1) * stages
    return max(FEWEST_PLACES, min(warm_up + 1 + SPARE_PLACES, passes))


def _layers(spec: Spec) -> int:
    """Return the most layers of a chunk."""
    layout = spec.parallelism
    assert spec.model is not None
    even = -(-spec.model.num_layers // (layout.pipeline * chunks_of(spec)))
    return max(even, layout.first_stage_layers or 0, layout.last_stage_layers or 0)


def _vocabulary(model: Model) -> int:
    multiple = model.make_vocab_size_divisible_by or 128
    return -(-(model.vocab_size or UNKNOWN_VOCABULARY) // multiple) * multiple


def _hidden_bytes(spec: Spec) -> int:
    """Return the bytes of the hidden states of a microbatch."""
    assert spec.model is not None and spec.training is not None
    return spec.model.seq_length * spec.training.micro_batch_size * spec.model.hidden_size * _number_bytes(spec)


def _number_bytes(spec: Spec) -> int:
    return 4 if spec.training is None or spec.training.precision == "fp32" else 2
