"""Shared memory as the operator computes it from a manifest is what the ranks of a worker take."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st

from megatronapp_common.job import MegatronJob, load_job, megatron_arguments
from megatronapp_common.job.inbox_memory import inbox_bytes
from megatronapp_trainer.config import parse
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.pipeline.dpp import DppPlan
from megatronapp_trainer.pipeline.planning.tasks import Placement, Shape
from megatronapp_trainer.pipeline.transport import inboxes
from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec

pytestmark = pytest.mark.torch

SIZES = st.fixed_dictionaries(
    {
        "stages": st.integers(2, 5),
        "chunks": st.integers(1, 3),
        "tensor": st.sampled_from([1, 2]),
        "data": st.integers(1, 2),
        "groups": st.integers(1, 4),
        "sequence": st.booleans(),
        "precision": st.sampled_from(["fp32", "bf16"]),
        "schedule": st.sampled_from([None, "auto", "dfc", "bfc", "static", "zero-bubble"]),
        "cap": st.one_of(st.none(), st.integers(1, 20), st.just("8Gi")),
    }
)


def job_of(sizes: dict[str, Any], nodes: int = 1) -> MegatronJob:
    stages, tensor, data = sizes["stages"], sizes["tensor"], sizes["data"]
    dpp = {"enabled": True, "chunks": sizes["chunks"], "schedule": sizes["schedule"]}
    if sizes["cap"] is not None and sizes["schedule"] not in {"static", "zero-bubble"}:
        dpp["memoryCap"] = sizes["cap"]
    parallelism = {"tensor": tensor, "pipeline": stages, "data": data}
    if sizes["sequence"] and tensor > 1:
        parallelism["sequenceParallel"] = True
    model = {"numLayers": stages * sizes["chunks"], "hiddenSize": 8, "numAttentionHeads": 4, "seqLength": 16}
    training = {
        "microBatchSize": 2,
        "globalBatchSize": 2 * data * stages * sizes["groups"],
        "trainIters": 1,
        "lr": 1e-3,
        "precision": sizes["precision"],
    }
    return load_job(
        {
            "apiVersion": "megatronapp.io/v1alpha1",
            "kind": "MegatronJob",
            "metadata": {"name": "sizes"},
            "spec": {
                "nodes": nodes,
                "procPerNode": stages * tensor * data // nodes,
                "parallelism": parallelism,
                "dpp": {name: value for name, value in dpp.items() if value is not None},
                "model": {"type": "gpt", "vocabSize": 64, **model},
                "training": training,
                "data": {"mock": True},
            },
        }
    )


def taken_bytes(job: MegatronJob, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that all ranks of a job take by the trainer's own arithmetic."""
    config = parse(megatron_arguments(job))
    layout = job.spec.parallelism
    chunks = config.parallel.num_virtual_stages_per_pipeline_rank or 1
    is_vee = config.dpp.dpp_schedule == "zero-bubble" and chunks == 2
    placement = Placement(layout.pipeline, chunks, Shape.VEE if is_vee else Shape.LOOP)
    length = config.model.seq_length // (layout.tensor if config.parallel.sequence_parallel else 1)
    shape = (length, config.training.micro_batch_size, config.model.hidden_size)
    spec = TensorSpec(shape, torch.bfloat16 if config.precision.bf16 else torch.float32)
    data = job.world.data_parallel_size
    microbatches = config.global_batch_size(data) // config.training.micro_batch_size // data
    peak = DppPlan(config.dpp, placement).peak_chunks(microbatches)
    addresses = inboxes.TaskAddresses(pipeline=range(layout.pipeline), tensor=range(layout.tensor))
    own = inboxes.Inboxes(placement, addresses, spec, peak)
    total = 0
    for rank in range(layout.pipeline):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        total += own.bytes * layout.tensor * data
    return total


@given(SIZES)
def test_of_a_single_worker_it_is_what_the_trainer_takes(sizes: dict[str, Any]) -> None:
    assume(sizes["schedule"] != "zero-bubble" or sizes["chunks"] < 3)
    job = job_of(sizes)
    with pytest.MonkeyPatch.context() as monkeypatch:
        try:
            taken = taken_bytes(job, monkeypatch)
        except UsageError:  # a cap below what the order needs
            return
    assert inbox_bytes(job) == taken


def test_of_several_workers_it_is_enough_for_all_neighbours_in_a_worker() -> None:
    sizes: dict[str, Any] = {"stages": 4, "chunks": 2, "tensor": 1, "data": 2, "groups": 2, "sequence": False}
    sizes |= {"precision": "fp32", "schedule": "auto", "cap": None}
    assert inbox_bytes(job_of(sizes, nodes=2)) == inbox_bytes(job_of(sizes)) // 2


def test_a_job_without_megadpp_needs_none() -> None:
    sizes = {"stages": 2, "chunks": 1, "tensor": 1, "data": 1, "groups": 2, "sequence": False}
    job = job_of(sizes | {"precision": "fp32", "schedule": None, "cap": None})
    document = job.model_dump(by_alias=True, exclude_none=True)
    document["spec"]["dpp"] = {}
    assert inbox_bytes(load_job(document)) == 0
