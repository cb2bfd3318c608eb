"""Sizes of a gang with `runPolicy.elastic`: the same training with fewer model replicas on fewer workers.

The global batch stays, so that each replica takes more microbatches of it. A size is allowed where the batch, the
workers and the experts can be divided among its replicas; the admission policy asks the same of `minData`
(`rules.policy.ELASTIC_RULES`).
"""

from megatronapp_common.job.api.spec import Spec
from megatronapp_common.job.megatron_job import MegatronJob
from megatronapp_common.job.world import World


def reduced_sizes(job: MegatronJob) -> tuple[int, ...]:
    """Return the allowed data-parallel sizes below that of the spec, largest first; none without `elastic`.

    Raises JobError where the numbers of the world do not agree.
    """
    elastic, world = job.spec.run_policy.elastic, job.world
    if elastic is None or not _may_change(job.spec):
        return ()
    full, nodes = world.data_parallel_size, world.nodes
    sizes = (full * count // nodes for count in range(nodes - 1, 0, -1) if full * count % nodes == 0)
    return tuple(data for data in sizes if data >= elastic.min_data and _divides(job.spec, world, data))


def resized(job: MegatronJob, data: int) -> MegatronJob:
    """Return the job with fewer model replicas, on fewer workers of the same shape.

    Return the job itself if it has no more replicas, or if these do not fill whole workers. Raises JobError where the
    numbers of its world do not agree.
    """
    world = job.world
    full, nodes = world.data_parallel_size, world.nodes
    if not 0 < data < full or nodes * data % full or world.fbd is not None:
        return job
    sizes = {
        "parallelism": job.spec.parallelism.model_copy(update={"data": data}),
        "nodes": nodes * data // full,
        "proc_per_node": world.proc_per_node[0],
    }
    return job.model_copy(update={"spec": job.spec.model_copy(update=sizes)})


def _may_change(spec: Spec) -> bool:
    """Return True if the training can continue in another size. A cluster may lack the admission policy."""
    saves = spec.checkpoint.save is not None and spec.checkpoint.save_interval is not None
    runs = spec.mode == "train" and spec.run_policy.restart == "InPlace" and not spec.faults
    return saves and runs and not spec.fbd.enabled and not spec.dpp.enabled


def _divides(spec: Spec, world: World, data: int) -> bool:
    """Return True if batch, ramp-up and experts can be divided among this many replicas of a training."""
    training = spec.training
    if training is None or training.global_batch_size is None or data % world.topology.expert:
        return False
    interleaved = (spec.parallelism.virtual_pipeline or 1) > 1
    stride = training.micro_batch_size * data * (spec.parallelism.pipeline if interleaved else 1)
    ramp = training.rampup_batch_size or ()
    return not any(samples % stride for samples in (training.global_batch_size, *ramp[:2]))
