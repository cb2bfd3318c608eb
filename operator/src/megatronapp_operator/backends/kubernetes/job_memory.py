"""State of a job between two reconciles, besides the job's status."""

import dataclasses

from megatronapp_common.job import MegatronJob, PinnedSettings, resized
from megatronapp_common.job.api.profile import Profile
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.backends.kubernetes.observe import PollResult
from megatronapp_operator.plan import LeavingNode, PodRejection, ProfileState, Status


@dataclasses.dataclass(slots=True)
class JobMemory:
    """State of one job between two reconciles."""

    uid: str
    generation: int
    spec_job: MegatronJob
    """Job with the size of its spec."""
    status: Status
    written: Object
    """Status of the object on the API server."""
    sent: Object
    """Status as we sent it, if we did; the server may omit fields that it does not know."""
    written_at: float = float("-inf")
    unwritten_since: float | None = None
    """Since when a change besides progress has not been written yet."""
    since: float = 0.0
    """When this process saw the job first."""
    profiles: tuple[Profile, ...] = ()
    """Profiles that the job is merged over, the lowest first."""
    profile_state: ProfileState | None = None
    """Report about them for the plan."""
    spec_source: tuple[object, ...] = ()
    """Key of the sources of the job (`SpecSource.key`)."""
    pinned: PinnedSettings | None = None
    volumes: str | None = None
    """Problems of the volume claims; None until they were checked."""
    volumes_seen: tuple[int, int] | None = None
    """Generation and attempt for which the claims were checked."""
    volumes_again_at: float | None = None
    """When they are read again after an error."""
    leaving_nodes: tuple[LeavingNode, ...] = ()
    """Nodes of the gang that are to be emptied."""
    nodes_again_at: float = float("-inf")
    """When the nodes of the gang are read next."""
    nodes_reserved_at: float | None = None
    """Time reserved for reading them, once that is due; None: no time is reserved."""
    pods_listed_at: float = float("-inf")
    """When the pods were last listed because some are being deleted."""
    agents_reported: frozenset[str] = frozenset()
    """Pods (uids) whose agents were reported as not running."""
    table_written: str | None = None
    """Digest of the rank table in the ConfigMap."""
    tended: int | None = None
    """Generation for which the objects of the running attempt were applied last; None: not known yet."""
    tend_at: float = 0.0
    """When those that cannot be listed are applied again, in case one was deleted or changed."""
    differing: tuple[str, ...] = ()
    """Objects that were missing from the last list, or differed from what was applied."""
    inherited: bool = True
    """True while the objects may be as another process, maybe of another release, has applied them."""
    maintenance: dict[str, tuple[float, str]] = dataclasses.field(default_factory=dict)
    """Tasks that failed: when each is tried again, and the error."""
    unknown_fields: tuple[str, ...] = ()
    """Fields of the spec that this release does not know and ignores."""
    ignored: tuple[str, ...] = ()
    """Unknown fields that were reported."""
    skipped_rules: tuple[str, ...] = ()
    """Problems by the rules of this release of a spec that an earlier release accepted."""
    skipped_reported: tuple[str, ...] = ()
    """Skipped rules that were reported."""
    warnings_reported: frozenset[str] = frozenset()
    """Reasons of the warnings about the spec that were reported."""
    poll_result: PollResult = dataclasses.field(default_factory=PollResult)
    refusal: PodRejection | None = None
    sized_jobs: dict[int, MegatronJob] = dataclasses.field(default_factory=dict)
    """Jobs of other sizes by data-parallel size, as what is rendered is cached by the identity of a job."""
    sized_from: MegatronJob | None = None
    """Job that they were made from."""

    @property
    def job(self) -> MegatronJob:
        """Job with the size of the current attempt."""
        return self.job_at(self.status)

    def job_at(self, status: Status) -> MegatronJob:
        """Return the job with the size of the attempt of a status."""
        data = None if status.gang_size is None else status.gang_size.data
        if self.sized_from is not self.spec_job:
            self.sized_jobs, self.sized_from = {}, self.spec_job
        if data is None:
            return self.spec_job
        if data not in self.sized_jobs:
            self.sized_jobs[data] = resized(self.spec_job, data)
        return self.sized_jobs[data]
