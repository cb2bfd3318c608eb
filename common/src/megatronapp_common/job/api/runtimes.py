"""Other ways to run the pipeline: MegaDPP and MegaFBD."""

from typing import Annotated

from pydantic import Field

from megatronapp_common.job.api.base import ManifestModel
from megatronapp_common.job.api.cluster import Labels, Resources
from megatronapp_common.job.api.model import MAX_NODES, MAX_PROC_PER_NODE


class Dpp(ManifestModel):
    """MegaDPP: a dynamic pipeline schedule with transfers of its own."""

    enabled: bool = False
    """Schedule dynamically; needs pipeline above 1."""
    workload: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """File with measured times of this model, from which the plan is made; left out: measured in the first steps."""


class ForwardWorkers(ManifestModel):
    """Workers of their own for forward ranks. They come after the backward workers, and so do their ranks."""

    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] | None = None
    """Forward workers; left out: derived from the number of forward ranks."""
    proc_per_node: Annotated[int, Field(ge=1, le=MAX_PROC_PER_NODE)] | None = None
    """Forward ranks of each; left out: derived from their number, else gpusPerNode."""
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs of each; 0: forward runs on the CPU."""
    node_selector: Labels | None = None
    """Labels of the nodes that they go to; left out: spec.nodeSelector."""
    resources: Resources | None = None
    """What the trainer's container gets there; left out: spec.resources."""


class Fbd(ManifestModel):
    """MegaFBD: forward and backward on separate ranks. World size = 2 x tensor x pipeline x data."""

    enabled: bool = False
    """Give each rank a forward rank beside it; parallelism.data stays what is trained with, so the world doubles."""
    ignore_forward_tensor_parallel: bool = False
    """One forward rank for each tensor group: world size = pipeline x data x (tensor + 1)."""
    forward: ForwardWorkers | None = None
    """Put forward ranks on workers of their own; nodes, procPerNode and gpusPerNode of the spec are then of the
    backward ranks alone. Left out: all workers are alike."""
