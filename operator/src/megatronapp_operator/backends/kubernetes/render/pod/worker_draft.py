"""Input for rendering one worker."""

import dataclasses
import functools

from megatronapp_common.job import MegatronJob, Spec, World
from megatronapp_common.job.world import WorkerGroup
from megatronapp_operator.backends.kubernetes.render.facts import RenderFacts, facts_of
from megatronapp_operator.backends.kubernetes.render.objects import ObjectNames
from megatronapp_operator.backends.kubernetes.render.settings import AttemptSettings, JobOwner, RenderSettings

TRAINER = "trainer"
AGENT = "agent"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerDraft:
    """Worker of an attempt, with everything that its pod depends on. Raises JobError if the world does not fit."""

    job: MegatronJob
    owner: JobOwner
    attempt: AttemptSettings
    index: int
    settings: RenderSettings
    spare: bool = False
    """True for a spare, whose index follows those of the gang."""

    @property
    def pod_name(self) -> str:
        """Name of the pod, which is its host name, too."""
        if self.spare:
            return self.names.spare(self.index - self.world.nodes, self.attempt.number)
        return self.names.worker(self.index)

    @property
    def spec(self) -> Spec:
        return self.job.spec

    @property
    def names(self) -> ObjectNames:
        return ObjectNames(self.owner.name)

    @functools.cached_property
    def facts(self) -> RenderFacts:
        """Facts that all workers of the job have in common."""
        return facts_of(self.job)

    @property
    def world(self) -> World:
        """Ranks and their distribution over workers."""
        return self.facts.world

    @functools.cached_property
    def group(self) -> WorkerGroup:
        """Group of workers with the same shape as this one."""
        return self.world.group_of(0 if self.spare else self.index)

    @property
    def gpus(self) -> int:
        """Number of GPUs of this worker."""
        return self.group.gpus_per_node

    @property
    def pins_memory(self) -> bool:
        """True if the trainer must be root to pin memory."""
        rdma = self.spec.network.rdma
        return rdma.enabled and rdma.ipc_lock

    @property
    def privileged(self) -> bool:
        """True if the trainer uses the node's own adapters, which no unprivileged container may open."""
        rdma = self.spec.network.rdma
        return rdma.enabled and rdma.devices == "HostPath"

    @property
    def in_place(self) -> bool:
        """True if the worker may continue with another attempt in the same pod."""
        return self.spec.run_policy.restart == "InPlace"

    @property
    def saves_by_request(self) -> bool:
        """True if the operator may request a checkpoint from the ranks."""
        return self.spec.run_policy.disruption == "CheckpointFirst"

    @property
    def serves(self) -> bool:
        return self.spec.mode == "serve"

    @property
    def host_network(self) -> bool:
        return self.spec.network.mode == "HostNetwork"
