"""Types of profiles: the object, and the record of a profile in the status of a job."""

import dataclasses
import enum
from typing import Annotated, Any

from pydantic import Field

from megatronapp_common.job.api.base import ManifestModel
from megatronapp_common.job.api.cluster import ObjectName
from megatronapp_common.job.api.metadata import Metadata
from megatronapp_common.job.api.status_fields import Count, StatusType

MAX_LOCKED = 128
FieldPath = Annotated[str, Field(min_length=1, max_length=512)]
MAX_TEMPLATE_BYTES = 32 << 10
"""Bytes of a template as JSON: the status of each job that uses the profile holds a copy."""
OWN_FIELDS = ("mode", "suspend", "managedBy", "profile")
"""Fields that a template may not have: they are the job's own, or name the profile."""


PROFILES_SCHEMA = {"type": "array", "items": {"type": "object"}}
"""Schema of the profiles in a status, without their fields: the definition of a job has little space left."""


class ProfileKind(enum.StrEnum):
    """Kinds of profiles, in the order in which they are merged, the lowest first."""

    CLUSTER = "ClusterMegatronProfile"
    NAMESPACE = "MegatronProfile"


class ProfileMetadata(Metadata):
    """Name and labels of a profile."""

    name: ObjectName  # longer than that of a job may be
    """Name of the profile."""


class ProfileSpec(ManifestModel):
    """Fields that a profile gives to jobs, and those that no job may change."""

    template: dict[str, Any] = Field(default={})
    """Any part of the spec of a MegatronJob, except mode, suspend, managedBy and profile. Values are merged below those
    of the job as by server-side apply: maps by key, env and initializers by name, other lists as a whole."""
    locked: Annotated[tuple[FieldPath, ...], Field(max_length=MAX_LOCKED)] = ()
    """Paths of fields that jobs may not set to another value, such as network or env[NCCL_IB_HCA]; with a block all
    fields in it are locked, also those that the template leaves out."""


class ProfileObject(ManifestModel):
    """A profile, in the API server's shape."""

    api_version: Annotated[str, Field(pattern=r"^megatronapp\.io/v1alpha1$")]
    """Always megatronapp.io/v1alpha1."""
    kind: ProfileKind
    """MegatronProfile or ClusterMegatronProfile."""
    metadata: ProfileMetadata
    """Name and labels."""
    spec: ProfileSpec
    """Fields that the profile gives and locks."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile(StatusType):
    """A profile as an attempt uses it."""

    kind: ProfileKind
    """MegatronProfile or ClusterMegatronProfile."""
    name: str
    """Name of the profile."""
    generation: Count = 0
    """Generation of its spec."""
    template: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields that it gives."""
    locked: tuple[str, ...] = ()
    """Paths of locked fields."""

    @property
    def label(self) -> str:
        """Kind and name, by which messages and origins name the profile."""
        return f"{self.kind}/{self.name}"
