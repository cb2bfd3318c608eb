"""Types of the other pipeline runtimes: MegaDPP and MegaFBD."""

from typing import Annotated

from pydantic import Field

from megatronapp_common.job.api.base import ManifestModel
from megatronapp_common.job.api.cluster import Labels, Resources
from megatronapp_common.job.api.model import MAX_NODES, MAX_PROC_PER_NODE


class Dpp(ManifestModel):
    """MegaDPP: a dynamic pipeline schedule with a separate transport."""

    enabled: bool = False
    """Schedule dynamically; needs pipeline above 1."""
    workload: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """File with measured times of this model, from which the plan is made; measured in the first steps by default."""


class ForwardWorkers(ManifestModel):
    """Separate workers for forward ranks. They and their ranks are numbered after the backward workers."""

    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] | None = None
    """Forward workers; derived from the number of forward ranks by default."""
    proc_per_node: Annotated[int, Field(ge=1, le=MAX_PROC_PER_NODE)] | None = None
    """Forward ranks of each; derived from their number by default, otherwise gpusPerNode."""
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs of each; 0: forward runs on the CPU."""
    node_selector: Labels | None = None
    """Labels of the nodes for these workers; defaults to spec.nodeSelector."""
    resources: Resources | None = None
    """Resources of the trainer's container there; defaults to spec.resources."""


class Fbd(ManifestModel):
    """MegaFBD: forward and backward on separate ranks. World size = 2 x tensor x pipeline x data."""

    enabled: bool = False
    """Add a forward rank to each rank; parallelism.data does not change, so the world doubles."""
    ignore_forward_tensor_parallel: bool = False
    """Run one forward rank for each tensor group: world size = pipeline x data x (tensor + 1)."""
    forward: ForwardWorkers | None = None
    """Run forward ranks on separate workers; nodes, procPerNode and gpusPerNode of the spec are then those of the
    backward ranks alone. By default all workers are alike."""
