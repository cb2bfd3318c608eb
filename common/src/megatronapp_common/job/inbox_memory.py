"""Shared memory that the messages of MegaDPP need, from a manifest: the arithmetic of the trainer's inboxes.

`tests/unit/trainer/pipeline/test_inbox_memory.py` compares it with the trainer's own, which decides at the start.
"""

from megatronapp_common.job.api.runtimes import Dpp
from megatronapp_common.job.api.spec import Spec
from megatronapp_common.job.megatron_job import MegatronJob

FILE_BYTES = 64 << 10
"""Upper bound of what a file takes beyond its slots."""
SLOT_BYTES = 640
"""Upper bound of what a slot takes beyond its message."""
SPARE_DIVISOR = 4
"""By default the schedule auto may keep activations of a quarter more chunks than the static order, at least of one."""
SPARE_CHUNKS_OF_BYTES = 8
"""The chunks more where the memory cap is in bytes, of which the manifest does not say how many chunks they are."""
MAX_SLOTS = 4096
"""Limit of the native transport."""


def inbox_bytes(job: MegatronJob) -> int:
    """Return an upper bound of the shared memory for messages of MegaDPP on a worker; 0 without it.

    With MegaFBD it is 0 as well, as `shipment_memory` has the messages of such a job.

    On the CPU it is the trainer's own number; ranks with GPUs need as much only where their devices do not reach each
    other. Flags in spec.args are not read. `rules.messages` has the same arithmetic.
    """
    dpp, layout, world = job.spec.dpp, job.spec.parallelism, job.world
    model, training = job.spec.model, job.spec.training
    if not dpp.enabled or world.fbd is not None or layout.pipeline < 2 or model is None or training is None:
        return 0
    stages, chunks = layout.pipeline, chunks_of(job.spec)
    is_ring = chunks > 1 and not _is_vee(dpp, chunks)
    ranks = max(world.proc_per_node)
    stride = world.world_size // stages
    neighbours = 2 * max(0, ranks - stride)  # ranks of a worker are consecutive, and stages are `stride` apart
    if world.nodes == 1 and is_ring and stages > 2:
        neighbours += 2 * stride
    samples = training.global_batch_size or training.micro_batch_size * world.data_parallel_size
    microbatches = samples // training.micro_batch_size // world.data_parallel_size
    slots = _peak_chunks(job, microbatches) * (1 if chunks == 1 else 2) + 2
    files = ranks * layout.tensor + neighbours
    length = model.seq_length // (layout.tensor if layout.sequence_parallel else 1)
    number_bytes = 4 if training.precision == "fp32" else 2
    message_bytes = length * training.micro_batch_size * model.hidden_size * number_bytes
    return neighbours * slots * (message_bytes + SLOT_BYTES) + files * FILE_BYTES


def chunks_of(spec: Spec) -> int:
    """Return the model chunks of each rank."""
    return spec.parallelism.virtual_pipeline or spec.dpp.chunks or 1


def _is_vee(dpp: Dpp, chunks: int) -> bool:
    return chunks == 2 and (dpp.schedule == "zero-bubble" or dpp.placement == "vee")


def _peak_chunks(job: MegatronJob, microbatches: int) -> int:
    """Return the most chunks whose activations a rank keeps at a time."""
    dpp, stages, chunks = job.spec.dpp, job.spec.parallelism.pipeline, chunks_of(job.spec)
    schedule = dpp.schedule or "auto"
    cap = None if dpp.memory_cap is None else str(dpp.memory_cap)
    capped = int(cap) if cap is not None and cap.isdecimal() else None
    if schedule in {"dfc", "bfc"}:
        return min(capped or stages, microbatches) * chunks
    warm_up = stages - 1 if chunks == 1 else 2 * (stages - 1) + (chunks - 1) * stages
    if _is_vee(dpp, chunks):
        warm_up = 2 * stages - 1
    planned = min(warm_up + 1, microbatches * chunks)
    if schedule != "auto":
        return planned
    most = planned + (max(1, planned // SPARE_DIVISOR) if cap is None else SPARE_CHUNKS_OF_BYTES)
    if capped is not None:
        most = capped * chunks
    return max(planned, min(most, microbatches * chunks))
