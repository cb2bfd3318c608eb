"""Maintenance of a job besides its plan: placement, missing agents, objects that were deleted or are obsolete.

It follows the status and the actions of a reconcile, and no error of it ends one: a job whose topology cannot be read,
or whose ConfigMap has the name of another object, is judged, restarted and ended like any other.
"""

import logging
import zlib
from collections.abc import Callable

from megatronapp_operator.backends.kubernetes import render
from megatronapp_operator.backends.kubernetes.client.errors import (
    ApiError,
    ForbiddenError,
    InvalidError,
    NamespaceTerminatingError,
    NameTakenError,
)
from megatronapp_operator.backends.kubernetes.execution.executor import Executor
from megatronapp_operator.backends.kubernetes.execution.job_context import JobContext
from megatronapp_operator.backends.kubernetes.execution.objects import surroundings_of
from megatronapp_operator.backends.kubernetes.job_memory import JobMemory
from megatronapp_operator.backends.kubernetes.status_writer import is_long
from megatronapp_operator.backends.kubernetes.store import ObjectStore
from megatronapp_operator.backends.kubernetes.surroundings import OwnedObjects
from megatronapp_operator.plan import TERMINAL_PHASES, EventType, Phase, RecordEvent

log = logging.getLogger(__name__)

TEND_S = 3600.0
"""Seconds between applying again those objects of a running attempt that the operator may not list."""
RULES_NAMED = 3
"""Maximum number of broken rules that one event names."""
RETRY_S = 30.0
"""Seconds until the next attempt after an error."""
LASTING = (ForbiddenError, InvalidError, NameTakenError)
"""Errors that do not pass by themselves, so that they are reported at the job."""


class JobMaintenance:
    """Maintenance of all jobs of one process."""

    def __init__(self, store: ObjectStore, executor: Executor, clock: Callable[[], float]) -> None:
        self._store = store
        self._executor = executor
        self._clock = clock
        self.lists: bool | None = None
        """True if Services and policies can be listed, so that `compare` is called; None: not tried yet."""

    def compare(self, memory: JobMemory, work: JobContext, found: OwnedObjects) -> bool:
        """Record which objects of a running attempt were deleted or changed; return True if any was."""
        memory.differing = ()
        if _is_current(memory, work):
            memory.differing = tuple(found.find_differences(surroundings_of(work)))
        return bool(memory.differing)

    async def run(self, memory: JobMemory, work: JobContext) -> float | None:
        """Do what is due; return when to reconcile again. Raises NamespaceTerminatingError, LeaseLostError."""
        await self._report_unknown(memory, work)
        await self._report_skipped(memory, work)
        await self._report_warnings(memory, work)
        for name, task in (
            ("places", self._publish_placement),
            ("agents", self._report_agents),
            ("tend", self._tend),
        ):
            retry_at, known = memory.maintenance.get(name, (0.0, ""))
            if self._clock() < retry_at:
                continue
            try:
                await task(memory, work)
                memory.maintenance.pop(name, None)
            except NamespaceTerminatingError:
                raise
            except (ApiError, NameTakenError) as error:
                memory.maintenance[name] = self._clock() + RETRY_S, str(error)
                if str(error) != known:
                    await self._report(work, error)
        times = [at for at, _ in memory.maintenance.values()]
        if "tend" not in memory.maintenance and memory.tend_at > self._clock():
            times.append(memory.tend_at)
        return min(times, default=None) if _lives(memory, work) else None

    async def _report_unknown(self, memory: JobMemory, work: JobContext) -> None:
        """Report the fields of a newer definition that have no effect here, once for each set of them."""
        if memory.unknown_fields and memory.unknown_fields != memory.ignored:
            fields = ", ".join(memory.unknown_fields)
            message = f"the definition is newer than this operator, which ignores {fields}; upgrade it"
            event = RecordEvent(type=EventType.WARNING, reason="UnknownFields", message=message)
            await self._executor.events.record(work.owner, event)
        memory.ignored = memory.unknown_fields

    async def _report_skipped(self, memory: JobMemory, work: JobContext) -> None:
        """Report the rules that the spec breaks and that are not enforced, once for each set of them."""
        rules = memory.skipped_rules
        if rules and rules != memory.skipped_reported and work.document["metadata"].get("deletionTimestamp") is None:
            more = f"; and {len(rules) - RULES_NAMED} more" if len(rules) > RULES_NAMED else ""
            message = (
                "the spec was accepted before these rules and runs unchanged; it would be rejected as a new job: "
                f"{'; '.join(rules[:RULES_NAMED])}{more}"
            )
            event = RecordEvent(type=EventType.WARNING, reason="RulesSkipped", message=message)
            await self._executor.events.record(work.owner, event)
        memory.skipped_reported = rules

    async def _report_warnings(self, memory: JobMemory, work: JobContext) -> None:
        """Report each warning about a valid spec once."""
        warnings = _warnings(work)
        for reason in warnings.keys() - memory.warnings_reported:
            event = RecordEvent(type=EventType.WARNING, reason=reason, message=warnings[reason])
            await self._executor.events.record(work.owner, event)
        memory.warnings_reported = frozenset(warnings)

    async def _report(self, work: JobContext, error: Exception) -> None:
        log.warning("%s/%s: %s", work.owner.namespace, work.owner.name, error)
        if isinstance(error, LASTING):
            reason = type(error).__name__.removesuffix("Error")
            await self._executor.events.record(
                work.owner, RecordEvent(type=EventType.WARNING, reason=reason, message=str(error))
            )

    async def _publish_placement(self, memory: JobMemory, work: JobContext) -> None:
        """Publish the topology that workers wait for, and a rank table that is too long for the status."""
        if not _lives(memory, work):
            return
        await self._executor.pods.write_topology(work)
        table = memory.poll_result.rank_table
        if table is not None and is_long(table) and memory.table_written != table.get("digest"):
            await self._executor.objects.write_rank_table(work, table)
            memory.table_written = table.get("digest")

    async def _report_agents(self, memory: JobMemory, work: JobContext) -> None:
        """Report agents that do not run. Training works without them, but its pages stay empty."""
        pods = self._store.pods(work.owner.namespace, memory.uid)
        troubled = {pod.uid: f"{pod.name}: {pod.agent_problem}" for pod in pods if pod.agent_problem}
        problems = sorted(text for uid, text in troubled.items() if uid not in memory.agents_reported)
        if problems:
            message = f"the trace of {len(problems)} workers is missing; {problems[0]}"
            event = RecordEvent(type=EventType.WARNING, reason="AgentNotRunning", message=message)
            await self._executor.events.record(work.owner, event)
        memory.agents_reported = (memory.agents_reported & {pod.uid for pod in pods}) | troubled.keys()

    async def _tend(self, memory: JobMemory, work: JobContext) -> None:
        """Restore deleted objects of the running attempt at intervals, and apply an edited policy at once.

        An edit that changes the pods waits for the next attempt, and the objects around the pods wait with it.
        """
        pinned, generation, now = memory.pinned, memory.generation, self._clock()
        if not _lives(memory, work) or pinned is None or pinned.attempt != memory.status.attempt:
            return
        if memory.tended is None:  # a new process spreads what it finds over the first hour
            memory.tended, memory.tend_at = pinned.generation, now + zlib.crc32(memory.uid.encode()) % TEND_S
        edited, differing = generation != memory.tended, memory.differing
        if not edited and not differing and now < memory.tend_at:
            return
        if render.template_hash(memory.job, work.settings) == pinned.template_hash:
            whole = edited or bool(differing) or memory.inherited or not self.lists
            await self._executor.objects.reapply(work, edited=edited, whole=whole)
            memory.inherited, memory.table_written = False, None
            if differing:
                log.info("%s/%s: restored %s", work.owner.namespace, work.owner.name, ", ".join(differing))
        memory.tended, memory.tend_at, memory.differing = generation, now + TEND_S, ()


def _warnings(work: JobContext) -> dict[str, str]:
    """Return what a valid spec cannot have on this cluster, by the reason of its Event."""
    spec, warnings = work.job.spec, {}
    if spec.network.rank_order == "Topology" and not work.settings.node_access:
        warnings["RankOrderIgnored"] = (
            "spec.network.rankOrder: Topology needs the right to read nodes, which this operator lacks; ranks "
            "follow the index of their worker. Install the chart with rbac.nodeAccess: true"
        )
    if render.loses_checkpoints(work.job):
        warnings["CheckpointsNotStored"] = (
            f"spec.checkpoint.save: {spec.checkpoint.save} is on no volume, so that checkpoints are deleted with their "
            "pod and a new pod begins at step 0; write a directory below the mountPath of spec.checkpoint.volume"
        )
    return warnings


def _is_current(memory: JobMemory, work: JobContext) -> bool:
    """Return True if the objects of a running attempt have to be as they are rendered now."""
    pinned = memory.pinned
    if not _lives(memory, work) or pinned is None or pinned.attempt != memory.status.attempt:
        return False
    return render.template_hash(memory.job, work.settings) == pinned.template_hash


def _lives(memory: JobMemory, work: JobContext) -> bool:
    """Return True if an attempt has begun, has not ended for good, and the job is not being deleted.

    A deletion raises the generation, too, and the garbage collector removes what would be restored.
    """
    status, deleting = memory.status, work.document["metadata"].get("deletionTimestamp") is not None
    return not deleting and status.attempt_time is not None and status.phase not in TERMINAL_PHASES | {Phase.SUSPENDED}
