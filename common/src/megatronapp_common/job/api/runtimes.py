"""Types of the other pipeline runtimes: MegaDPP and MegaFBD."""

from typing import Annotated, Literal

from pydantic import Field

from megatronapp_common.job.api.base import ManifestModel
from megatronapp_common.job.api.cluster import Labels, Resources
from megatronapp_common.job.api.model import MAX_NODES, MAX_PROC_PER_NODE, Count
from megatronapp_common.job.api.quantity import MemoryCap

MAX_COPY_THREADS = 64
"""Limit of the native transport."""
MAX_SERVED = 64
"""Most replicas that a forward rank serves; a backward pass takes two to three times as long as a forward pass."""


class Dpp(ManifestModel):
    """MegaDPP: a pipeline schedule that decides during the step, over the native transport (docs/megadpp.md)."""

    enabled: bool = False
    """Schedule dynamically; needs pipeline above 1."""
    schedule: Literal["auto", "dfc", "bfc", "static", "zero-bubble"] | None = None
    """Order of the passes of a rank. auto (the default): the static order, left while an input is late; dfc, bfc: any
    ready pass, depth or breadth first; static: megatron-core's; zero-bubble: ZB-H1 with one chunk on each rank, ZB-V
    with two."""
    placement: Literal["loop", "vee"] | None = None
    """How stages are spread over ranks. vee: with two chunks, as ZB-V has them; auto is then guided by ZB-V."""
    memory_cap: MemoryCap | None = None
    """Activations that a rank may keep: microbatches, or bytes such as 8Gi. Defaults with auto to a quarter more than
    the static order keeps, with dfc and bfc to the number of stages."""
    chunks: Count | None = None
    """Model chunks of each rank: another name of parallelism.virtualPipeline, which is 1 without either."""
    transport: Literal["auto", "native"] | None = None
    """How stages exchange tensors: both values are the native transport, as NCCL needs an order known before the
    step."""
    workload: Annotated[int, Field(ge=1, le=MAX_COPY_THREADS)] | None = None
    """Threads of a rank that copy its messages; defaults to 1."""


class ForwardWorkers(ManifestModel):
    """Separate workers for forward ranks. They and their ranks are numbered after the backward workers."""

    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] | None = None
    """Forward workers; derived from the number of forward ranks by default."""
    proc_per_node: Annotated[int, Field(ge=1, le=MAX_PROC_PER_NODE)] | None = None
    """Forward ranks of each; derived from their number by default, otherwise gpusPerNode."""
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs of each; 0: forward runs on the CPU, which with GPUs for backward ranks needs ship: full and no dropout."""
    node_selector: Labels | None = None
    """Labels of the nodes for these workers; defaults to spec.nodeSelector."""
    resources: Resources | None = None
    """Resources of the trainer's container there; defaults to spec.resources."""


class Fbd(ManifestModel):
    """MegaFBD: forward and backward on separate ranks (docs/megafbd.md). World size = 2 x tensor x pipeline x data."""

    enabled: bool = False
    """Add a forward rank to each rank; parallelism.data does not change, so the world doubles."""
    backward_per_forward: Annotated[int, Field(ge=1, le=MAX_SERVED)] = 1
    """Replicas whose backward ranks one forward rank serves in turns; divides data. World size = tensor x pipeline x
    (data + data / backwardPerForward)."""
    ignore_forward_tensor_parallel: bool = False
    """Run one forward rank for each tensor group: world size = pipeline x data x (tensor + 1)."""
    ship: Literal["saved", "selective", "full", "auto"] | None = None
    """Tensors that forward ranks send. saved: all that autograd saves; selective: not those of core attention; full:
    the input of each layer; auto: what is fastest. Defaults to what training.recompute leaves, otherwise saved."""
    forward: ForwardWorkers | None = None
    """Run forward ranks on separate workers; nodes, procPerNode and gpusPerNode of the spec are then those of the
    backward ranks. By default all workers are alike."""
