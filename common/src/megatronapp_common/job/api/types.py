"""The object itself."""

from typing import Literal

from megatronapp_common.job.api.base import ManifestModel
from megatronapp_common.job.api.metadata import Metadata
from megatronapp_common.job.api.spec import Spec
from megatronapp_common.job.api.status import Status
from megatronapp_common.job.world import World, derive_world


class MegatronJob(ManifestModel):
    """A job on Megatron-core that trains or serves: one gang of workers, its model, its data and its care."""

    api_version: Literal["megatronapp.io/v1alpha1"]
    """Always megatronapp.io/v1alpha1."""
    kind: Literal["MegatronJob"]
    """Always MegatronJob."""
    metadata: Metadata
    """Name and labels."""
    spec: Spec
    """What to train or serve, on what, and how to keep it alive."""
    status: Status = Status()
    """What the backend has seen; whatever a manifest says here is overwritten."""

    @property
    def world(self) -> World:
        """Ranks and where they go. Raises JobError if nodes, procPerNode and parallelism do not agree."""
        return derive_world(self.spec)
