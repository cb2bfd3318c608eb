"""Metadata of the object, in the API server's shape."""

from typing import Annotated, Any

from pydantic import Field

from megatronapp_common.job.api.base import ManifestModel

MAX_NAME_LENGTH = 50
"""A pod's name is its host name (63 characters) and adds `-worker-<index>` to the job's."""
NAME_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
JOB_NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
"""Names of Services begin with a letter, and a job has one."""
DnsLabel = Annotated[str, Field(min_length=1, max_length=63, pattern=NAME_PATTERN)]
JobName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH, pattern=JOB_NAME_PATTERN)]


class Metadata(ManifestModel):
    """Name and labels of a job; all other fields are written by the API server or the backend."""

    name: JobName
    """Lower-case letters, digits and '-', a letter first, at most 50 characters."""
    namespace: DnsLabel = "default"
    """Namespace of the job."""
    labels: dict[str, str] = Field(default={})
    """Labels of the job."""
    annotations: dict[str, str] = Field(default={})
    """Annotations of the job."""
    uid: str | None = None
    """Unique id; changes when a job of the same name is created again."""
    generation: int | None = None
    """Number of changes of the spec."""
    resource_version: str | None = None
    """Version of the object for optimistic locking."""
    creation_timestamp: str | None = None
    """Time at which the object was created."""
    deletion_timestamp: str | None = None
    """Time at which deletion was requested."""
    deletion_grace_period_seconds: int | None = None
    """Seconds that deletion may take."""
    finalizers: tuple[str, ...] = ()
    """Names that block deletion."""
    owner_references: tuple[dict[str, Any], ...] = ()
    """Objects that own this one."""
    managed_fields: tuple[dict[str, Any], ...] = ()
    """Managers and the fields that each has set."""
