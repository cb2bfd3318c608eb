"""The type of the object, MegatronJob."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from megatronapp_common.job.api.base import ManifestModel
from megatronapp_common.job.api.metadata import Metadata
from megatronapp_common.job.api.spec import Spec
from megatronapp_common.job.api.status import Status
from megatronapp_common.job.status import read_status
from megatronapp_common.job.world import World, derive_world


class MegatronJob(ManifestModel):
    """A job on Megatron-core that trains or serves: one gang of workers, its model, its data and its life."""

    api_version: Literal["megatronapp.io/v1alpha1"]
    """Always megatronapp.io/v1alpha1."""
    kind: Literal["MegatronJob"]
    """Always MegatronJob."""
    metadata: Metadata
    """Name and labels."""
    spec: Spec
    """Desired state: a model to train or serve, its resources, and how it is restarted."""
    status: Annotated[Status, BeforeValidator(read_status)] = Status()
    """Observed state; a status in a manifest is overwritten."""

    @property
    def world(self) -> World:
        """Placement of all ranks. Raises JobError if nodes, procPerNode and parallelism do not agree."""
        return derive_world(self.spec)
