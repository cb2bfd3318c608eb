"""Shared memory as the operator computes it from a manifest is what the ranks of a worker take."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.errors import JobError
from megatronapp_common.job import MegatronJob, load_job, megatron_arguments
from megatronapp_common.job.inbox_memory import inbox_bytes
from megatronapp_trainer.config import parse
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
        "placement": st.sampled_from([None, "loop", "vee"]),
        "cap": st.one_of(st.none(), st.integers(1, 20), st.just("8Gi")),
    }
)


def job_of(sizes: dict[str, Any], nodes: int = 1) -> MegatronJob:
    stages, tensor, data = sizes["stages"], sizes["tensor"], sizes["data"]
    dpp = {"enabled": True, "chunks": sizes["chunks"]} | {name: sizes[name] for name in ("schedule", "placement")}
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
    """Bytes that the ranks of a worker take by the trainer's own arithmetic."""
    config = parse(megatron_arguments(job))
    layout = job.spec.parallelism
    chunks = config.parallel.num_virtual_stages_per_pipeline_rank or 1
    placement = Placement(layout.pipeline, chunks, Shape.VEE if config.is_vee else Shape.LOOP)
    length = config.model.seq_length // (layout.tensor if config.parallel.sequence_parallel else 1)
    shape = (length, config.training.micro_batch_size, config.model.hidden_size)
    spec = TensorSpec(shape, torch.bfloat16 if config.precision.bf16 else torch.float32)
    data = job.world.data_parallel_size
    microbatches = config.global_batch_size(data) // config.training.micro_batch_size // data
    peak = DppPlan(config.dpp, placement).peak_chunks(microbatches)
    stride, per_node = layout.tensor * data, max(job.world.proc_per_node)
    proposals = []
    for rank in range(job.world.world_size):
        tensor = rank // layout.tensor * layout.tensor
        pipeline = range(rank % stride, job.world.world_size, stride)
        addresses = inboxes.TaskAddresses(pipeline=pipeline, tensor=range(tensor, tensor + layout.tensor))
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        own = inboxes.Inboxes(placement, addresses, spec, peak)
        proposals.append(
            inboxes._Proposal(
                job="",
                memory=str(rank // per_node),
                neighbours=tuple(own.neighbours),
                boards=tuple(own.boards),
                inbox_bytes=own.inbox_bytes,
                pinned_bytes=own.pinned_bytes,
                free=None,
                reach=None,
            )
        )
    sums: dict[str, int] = {}
    for proposal in proposals:
        sums[proposal.memory] = sums.get(proposal.memory, 0) + inboxes._needed(proposal, proposals)
    assert len(set(sums.values())) == 1, "workers are alike"
    return next(iter(sums.values()))


def valid_job(sizes: dict[str, Any], nodes: int) -> MegatronJob:
    """Return a job of these sizes on as many nodes as divide its ranks, without what admission refuses."""
    nodes = math.gcd(sizes["stages"] * sizes["tensor"] * sizes["data"], nodes)
    if sizes["schedule"] == "zero-bubble":
        sizes = {**sizes, "chunks": min(sizes["chunks"], 2)}
    if sizes["placement"] == "vee" and sizes["schedule"] in {None, "auto", "zero-bubble"}:
        sizes = {**sizes, "chunks": 2}
    else:
        sizes = {**sizes, "placement": None}
    try:
        return job_of(sizes, nodes)
    except JobError:
        return job_of({**sizes, "cap": None}, nodes)


@given(SIZES, st.integers(1, 12))
def test_it_is_what_the_ranks_of_a_worker_take(sizes: dict[str, Any], nodes: int) -> None:
    job = valid_job(sizes, nodes)
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert inbox_bytes(job) == taken_bytes(job, monkeypatch)
