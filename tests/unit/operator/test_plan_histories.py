"""Plan against generated histories: a world that fails, reports falsely or late, and carries out only part of the
actions."""

import dataclasses
import json
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from worker_groups import worker_groups

from megatronapp_common.names import ExitCode
from megatronapp_operator.plan import (
    TERMINAL_PHASES,
    Action,
    Backoff,
    CleanPodPolicy,
    ConditionType,
    CreateInit,
    CreateWorker,
    DeleteHub,
    DeleteInit,
    DeleteJob,
    DeleteWorker,
    Deletion,
    EnsureHub,
    EnsureSecret,
    FailureAction,
    FailureMatch,
    FailureRule,
    HubPhase,
    HubState,
    InitPod,
    JobSpec,
    JobState,
    NodeExclusion,
    Observed,
    Phase,
    Plan,
    PodGroupKey,
    PodRejection,
    Progress,
    RecordEvent,
    RemoveGroup,
    RunPolicy,
    SlowNodeAction,
    SlowNodePolicy,
    SlowRank,
    StopRequest,
    SuccessPolicy,
    Worker,
    WorkerOutcome,
    WorkerPhase,
    plan,
)
from megatronapp_operator.plan_io.status_document import status_document
from megatronapp_operator.plan_io.status_reader import read_status

CODES = [*ExitCode, 137, 2, 201]
RULES = [
    (),
    (FailureRule(match=FailureMatch(exit_codes=(137,)), action=FailureAction.IGNORE),),
    (
        FailureRule(match=FailureMatch(workers=(0,)), action=FailureAction.RESTART_IGNORE_MAX),
        FailureRule(match=FailureMatch(message_regex="lost|words"), action=FailureAction.EXCLUDE_AND_RESTART),
    ),
]
GROUPS = st.integers(1, 4).flatmap(
    lambda workers: st.builds(worker_groups, st.just(workers), st.integers(0, workers - 1))
)
ENDS = {
    Phase.SUCCEEDED: ConditionType.COMPLETE,
    Phase.FAILED: ConditionType.FAILED,
    Phase.SUSPENDED: ConditionType.SUSPENDED,
}
UNDERWAY = (ConditionType.RUNNING, ConditionType.RESTARTING, ConditionType.STALLED)
SOON = 1e-5
"""A plan wakes up to the microsecond."""
LONG_ENOUGH = 400
"""Wake-ups after which a silent job must have ended."""


class History(RuleBasedStateMachine):
    """Life of one job."""

    @initialize(
        max_restarts=st.integers(0, 3),
        hub=st.booleans(),
        active=st.none() | st.floats(10, 500),
        reset=st.floats(1, 200),
        cluster=st.fixed_dictionaries(
            {
                "worker_groups": GROUPS,
                "initializers": st.booleans(),
                "gang": st.booleans(),
                "group": st.sampled_from(PodGroupKey),
                "success": st.sampled_from(SuccessPolicy),
                "slow_node": st.builds(SlowNodePolicy, action=st.sampled_from(SlowNodeAction), min_s=st.just(30)),
            }
        ),
        end=st.fixed_dictionaries(
            {
                "rules": st.sampled_from(RULES),
                "clean": st.sampled_from(CleanPodPolicy),
                "ttl_s": st.none() | st.floats(0, 100),
            }
        ),
    )
    def start(
        self,
        *,
        max_restarts: int,
        hub: bool,
        active: float | None,
        reset: float,
        cluster: dict[str, Any],
        end: dict[str, Any],
    ) -> None:
        policy = RunPolicy(
            max_restarts=max_restarts,
            backoff=Backoff(initial_s=5, max_s=20),
            reset_after_s=reset,
            active_deadline_s=active,
            start_deadline_s=60,
            progress_deadline_s=90,
            exclusion=NodeExclusion(max_nodes=2, ttl_s=200),
            **end,
        )
        self.job = JobState(spec=JobSpec(name="job", uid="u", hub=hub, hub_retain_s=30, policy=policy, **cluster))
        self.world = Observed()
        self.now = 1000.0
        self.last: Plan | None = None
        self.counters = (0, 0)
        self.room = True
        self.judged: set[tuple[int, int]] = set()
        self.groups: set[int] = set()
        """Attempts of which a scheduler keeps a group."""

    # What may happen in the world.

    @rule(seconds=st.floats(0, 120))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(carried_out=st.none() | st.integers(0, 4))
    def reconcile(self, carried_out: int | None) -> None:
        """Plan; then the backend may die after the first few actions."""
        self.finish_workloads()
        made = plan(self.job, self.world, self.now)
        assert made == plan(self.job, self.world, self.now), "the plan must be a function"
        self.judged |= {(one.attempt, one.index) for one in self.world.workers if not one.live}
        self.job = dataclasses.replace(self.job, status=made.status)
        self.check_memory()
        for action in made.actions[:carried_out]:
            self.carry_out(action)
        self.last, self.planned_before_the_stop = made, self.job.stop is None
        if carried_out is None:
            self.check_idempotent()
            self.check_wakes(made)

    @precondition(lambda self: self.world.workers)
    @rule(data=st.data())
    def worker_runs(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.world.workers))
        if worker.phase is WorkerPhase.PENDING:
            self.replace(worker, phase=WorkerPhase.RUNNING)

    @precondition(lambda self: self.world.workers)
    @rule(data=st.data(), code=st.sampled_from(CODES), late=st.floats(0, 3))
    def worker_ends(self, data: st.DataObject, code: int, late: float) -> None:
        worker = data.draw(st.sampled_from(self.world.workers))
        if worker.live:
            phase = WorkerPhase.FAILED if code else WorkerPhase.SUCCEEDED
            self.replace(worker, phase=phase, outcome=WorkerOutcome(code=code), finished_at=self.now - late)

    @precondition(lambda self: self.world.workers)
    @rule()
    def all_succeed(self) -> None:
        for worker in self.world.workers:
            if worker.live:
                self.replace(worker, phase=WorkerPhase.SUCCEEDED, outcome=WorkerOutcome(code=0), finished_at=self.now)

    @precondition(lambda self: self.world.workers)
    @rule(data=st.data())
    def worker_vanishes(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.world.workers))
        self.world = dataclasses.replace(self.world, workers=tuple(one for one in self.world.workers if one != worker))

    @rule()
    def asked_workers_go(self) -> None:
        self.world = dataclasses.replace(
            self.world, workers=tuple(one for one in self.world.workers if one.deletion is None)
        )

    @precondition(lambda self: self.world.workers)
    @rule(data=st.data(), reason=st.none() | st.just("Evicted"), grace=st.floats(1, 60))
    def worker_is_taken_away(self, data: st.DataObject, reason: str | None, grace: float) -> None:
        """Remove a worker as the cluster or a user may."""
        worker = data.draw(st.sampled_from(self.world.workers))
        if worker.live and worker.deletion is None:
            self.replace(worker, disrupted=reason, deletion=Deletion(since=self.now, grace_s=grace))

    @precondition(lambda self: self.world.workers)
    @rule(data=st.data(), answers=st.booleans())
    def machine_is_quiet_or_answers(self, data: st.DataObject, answers: bool) -> None:
        worker = data.draw(st.sampled_from(self.world.workers))
        if worker.live and worker.node is not None:
            self.replace(worker, unreachable_since=None if answers else self.now)

    @precondition(lambda self: self.world.init is not None)
    @rule(reason=st.none() | st.just("Evicted"), quiet=st.booleans())
    def init_is_taken_away(self, reason: str | None, quiet: bool) -> None:
        assert self.world.init is not None
        init = dataclasses.replace(
            self.world.init, disrupted=reason, unreachable_since=self.now if quiet else None, begun_at=self.now
        )
        self.world = dataclasses.replace(self.world, init=init)

    @rule(heard=st.none() | st.floats(0, 200))
    def somebody_was_heard(self, heard: float | None) -> None:
        at = None if heard is None else self.now - heard
        self.world = dataclasses.replace(self.world, last_contact=at)

    @rule(waiting=st.none() | st.sampled_from(["ErrImagePull: no", "ImagePullBackOff", "Unschedulable: full"]))
    def hub_waits(self, waiting: str | None) -> None:
        if self.world.hub is not None:
            self.world = dataclasses.replace(self.world, hub=dataclasses.replace(self.world.hub, waiting=waiting))

    @rule(room=st.booleans())
    def room_changes(self, room: bool) -> None:
        self.room = room

    @precondition(lambda self: self.world.workers)
    @rule(data=st.data())
    def worker_is_placed(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.world.workers))
        if worker.live:
            self.replace(worker, scheduled=True, node=f"node-{worker.index + worker.attempt}")

    @rule(final=st.integers(0, 4))
    def creation_is_refused(self, final: int) -> None:
        refusal = PodRejection(
            attempt=self.job.status.attempt, final=final == 0, reason="QuotaExceeded", message="full"
        )
        self.world = dataclasses.replace(self.world, refusal=refusal)

    @precondition(lambda self: self.world.init is not None)
    @rule(phase=st.sampled_from(WorkerPhase), gone=st.booleans())
    def init_changes(self, phase: WorkerPhase, gone: bool) -> None:
        init = self.world.init
        if gone or init is None:
            self.world = dataclasses.replace(self.world, init=None)
        elif init.live:
            self.world = dataclasses.replace(self.world, init=dataclasses.replace(init, phase=phase))

    @rule(node=st.integers(0, 3), old=st.floats(0, 60), none=st.booleans())
    def hub_judges(self, node: int, old: float, none: bool) -> None:
        verdict = SlowRank(
            id=f"v{node}", subject="node", ranks=(), cause="compute", state="confirmed", sentence="Slow.",
            slowdown=1.5, node=f"node-{node}", since_attempt=self.job.status.attempt,
            since_time=round(self.now - old, 6),
        )  # fmt: skip
        self.world = dataclasses.replace(self.world, slow_ranks=() if none else (verdict,))

    @rule(iteration=st.integers(0, 50), attempt=st.integers(0, 5))
    def progress_is_read(self, iteration: int, attempt: int) -> None:
        self.world = dataclasses.replace(self.world, progress=Progress(attempt=attempt, iteration=iteration))

    @rule(ended=st.booleans())
    def hub_changes(self, ended: bool) -> None:
        if self.world.hub is not None:
            phase = HubPhase.ENDED if ended else HubPhase.READY
            hub = dataclasses.replace(self.world.hub, phase=phase, ended_at=self.now if ended else None)
            self.world = dataclasses.replace(self.world, hub=hub)

    @rule(suspend=st.booleans())
    def suspension(self, suspend: bool) -> None:
        self.job = dataclasses.replace(self.job, spec=dataclasses.replace(self.job.spec, suspend=suspend))

    @rule(force=st.booleans())
    @precondition(lambda self: self.now > 1300)
    def stop(self, force: bool) -> None:
        force = force or (self.job.stop is not None and self.job.stop.force)
        self.job = dataclasses.replace(self.job, stop=StopRequest(reason="Interrupted", message="", force=force))

    # What must hold.

    @invariant()
    def one_attempt_at_a_time(self) -> None:
        if hasattr(self, "world"):
            assert len({one.attempt for one in self.world.workers}) <= 1

    @invariant()
    def nothing_lives_after_the_end(self) -> None:
        if hasattr(self, "job") and self.job.status.phase in TERMINAL_PHASES:
            assert not any(one.live for one in self.world.workers)

    @invariant()
    def a_stopped_job_starts_nothing(self) -> None:
        if hasattr(self, "job") and self.job.stop is not None and self.last is not None:
            created = [action for action in self.last.actions if isinstance(action, CreateWorker)]
            assert not created or self.planned_before_the_stop

    @invariant()
    def counters_only_grow(self) -> None:
        if hasattr(self, "job"):
            status = self.job.status
            assert status.attempt >= self.counters[0]
            assert status.restarts >= self.counters[1]
            assert 0 <= status.restarts_towards_max <= min(status.restarts, self.job.spec.policy.max_restarts)
            self.counters = (status.attempt, status.restarts)

    @invariant()
    def the_end_is_the_end(self) -> None:
        ended = getattr(self, "ended_as", None)
        if ended is not None:
            assert (self.job.status.phase, self.job.status.completion_time) == ended
        elif hasattr(self, "job") and self.job.status.phase in TERMINAL_PHASES:
            self.ended_as = (self.job.status.phase, self.job.status.completion_time)

    @invariant()
    def a_job_has_one_end(self) -> None:
        """Check that the conditions that are true agree with the phase."""
        if hasattr(self, "job"):
            status = self.job.status
            told = {phase for phase, kind in ENDS.items() if status.is_true(kind)}
            assert told == ({status.phase} & set(ENDS))
            if told:
                assert not any(map(status.is_true, UNDERWAY))
            if status.phase is Phase.SUCCEEDED:
                assert not status.is_true(ConditionType.FAILURE_TARGET)
                assert "Interrupted" not in {one.reason for one in status.conditions}

    @invariant()
    def budgets_hold(self) -> None:
        if hasattr(self, "job"):
            status, policy = self.job.status, self.job.spec.policy
            assert status.init_restarts <= policy.max_restarts
            nodes = [one.node for one in status.excluded_nodes]
            assert len(nodes) == len(set(nodes)) <= policy.exclusion.max_nodes

    def check_memory(self) -> None:
        """Check that an operator that starts again here continues as this one would."""
        written = json.loads(json.dumps(status_document(self.job.status)))
        assert read_status(written) == self.job.status

    def check_idempotent(self) -> None:
        if any(
            isinstance(action, DeleteJob | RemoveGroup) or action == DeleteInit(force=True)
            or (isinstance(action, DeleteWorker)
            and (action.grace_s == 0 or self.job.spec.group is PodGroupKey.WORKLOAD))
            for action in self.last_actions()
        ):  # fmt: skip
            return  # what was removed by force or with a group is deleted by now, so the next plan sees another world
        again = plan(self.job, self.world, self.now)
        if any(isinstance(action, EnsureHub | CreateInit | CreateWorker) for action in self.last_actions()):
            # what was created is seen now for the first time; only the count of replicas may follow from it
            self.job = dataclasses.replace(self.job, status=again.status)
            assert again.actions == ()
            again = plan(self.job, self.world, self.now)
        assert again.actions == ()
        assert dataclasses.replace(again.status, replicas=self.job.status.replicas) == self.job.status

    def check_wakes(self, made: Plan) -> None:
        """Check that all that can time out has a time of its next reconciliation."""
        status, policy = made.status, self.job.spec.policy
        spec = self.job.spec
        open_end = (spec.initializers and not status.initialized) or (spec.gang and status.holding_time is None)
        timed = status.phase in {Phase.STARTING, Phase.RUNNING, Phase.RESTARTING} and not open_end
        if timed:
            assert made.wake_at is not None
        deciding = timed and not status.is_true(ConditionType.FAILURE_TARGET)
        held_since = None if status.holding_time is None else status.holding_time - status.active_s
        start = held_since if spec.gang else status.start_time
        if policy.active_deadline_s is not None and start is not None and deciding:
            limit = start + policy.active_deadline_s
            assert made.wake_at is not None and (made.wake_at <= limit + SOON or limit <= self.now + SOON)
        if any(isinstance(action, DeleteWorker) and action.grace_s for action in made.actions):
            assert made.wake_at is not None

    def teardown(self) -> None:
        """Stop all reports, so that workers end by force alone: the job must still reach its end."""
        if not hasattr(self, "job"):
            return
        self.all_is_placed()
        self.world = dataclasses.replace(self.world, last_contact=None)
        for _ in range(LONG_ENOUGH):
            self.finish_workloads()
            made = plan(self.job, self.world, self.now)
            self.job = dataclasses.replace(self.job, status=made.status)
            for action in made.actions:
                self.carry_out(action)
            deeds = [action for action in made.actions if not isinstance(action, RecordEvent)]
            if not deeds and made.wake_at is None:
                break
            if not deeds:
                assert made.wake_at is not None and made.wake_at > self.now
                self.now = made.wake_at
        else:
            raise AssertionError(f"a silent job goes on for ever: {self.job.status}")
        resting = TERMINAL_PHASES | {Phase.SUSPENDED}
        assert self.job.status.phase in resting
        assert not any(one.live for one in self.world.workers)
        assert self.job.spec.group is not PodGroupKey.POD_GROUP or not self.groups

    def all_is_placed(self) -> None:
        """Place all workers and end the initializer: both may take any time, so the silence begins after them."""
        self.room = True
        for worker in self.world.workers:
            self.replace(worker, scheduled=True)
        init = self.world.init
        if init is not None and init.phase is WorkerPhase.RUNNING:
            self.world = dataclasses.replace(self.world, init=dataclasses.replace(init, phase=WorkerPhase.SUCCEEDED))

    # How the world obeys.

    def last_actions(self) -> tuple[Action, ...]:
        return () if self.last is None else self.last.actions

    def carry_out(self, action: Action) -> None:
        match action:
            case EnsureSecret():
                self.world = dataclasses.replace(self.world, secret=True)
            case EnsureHub():
                starts = 1 if self.world.hub is None else self.world.hub.starts + 1
                self.world = dataclasses.replace(self.world, hub=HubState(phase=HubPhase.STARTING, starts=starts))
            case DeleteHub():
                assert self.world.hub is not None
                self.world = dataclasses.replace(self.world, hub=dataclasses.replace(self.world.hub, deleting=True))
            case CreateInit():
                assert self.job.status.phase not in TERMINAL_PHASES
                assert self.world.init is None and not self.job.status.initialized
                new = InitPod(phase=WorkerPhase.PENDING, created_at=self.now)
                self.world = dataclasses.replace(self.world, init=new)
            case DeleteInit():
                assert self.world.init is not None
                gone = None if action.force else dataclasses.replace(self.world.init, deleting=True)
                self.world = dataclasses.replace(self.world, init=gone)
            case DeleteJob():
                assert self.job.status.phase in TERMINAL_PHASES
                self.job = dataclasses.replace(self.job, deletion_requested=True)
            case CreateWorker():
                self.create(action)
            case DeleteWorker():
                self.delete(action)
            case RemoveGroup():
                self.remove_group(action)

    def create(self, action: CreateWorker) -> None:
        assert self.job.status.phase not in TERMINAL_PHASES
        assert self.job.status.initialized or not self.job.spec.initializers
        assert all(one.index != action.index for one in self.world.workers)
        assert (action.attempt, action.index) not in self.judged, "a worker that has ended is started again"
        new = Worker(
            index=action.index, attempt=action.attempt, phase=WorkerPhase.PENDING, started_at=self.now,
            scheduled=self.room,
        )  # fmt: skip
        self.world = dataclasses.replace(self.world, workers=(*self.world.workers, new))
        self.groups.add(action.attempt)

    def delete(self, action: DeleteWorker) -> None:
        target = next(one for one in self.world.workers if (one.index, one.attempt) == (action.index, action.attempt))
        queued = self.job.spec.group is PodGroupKey.WORKLOAD
        grace_s = 0.0 if queued and not target.scheduled else action.grace_s
        self.replace(target, deletion=Deletion(since=self.now, grace_s=grace_s))
        held = queued and action.attempt in self.groups and target.live
        if grace_s == 0 and not held:
            workers = tuple(one for one in self.world.workers if one.index != action.index)
            self.world = dataclasses.replace(self.world, workers=workers)

    def remove_group(self, action: RemoveGroup) -> None:
        members = [one for one in self.world.workers if one.attempt == action.attempt]
        assert not any(one.live and one.deletion is None for one in members), "a gang that is wanted loses its group"
        self.groups.discard(action.attempt)
        gone = frozenset({action.attempt, *self.world.groups_removed})
        self.world = dataclasses.replace(self.world, groups_removed=gone)
        if self.job.spec.group is PodGroupKey.WORKLOAD:
            others = tuple(one for one in self.world.workers if one not in members)
            self.world = dataclasses.replace(self.world, workers=others)

    def finish_workloads(self) -> None:
        """Kueue lets go of pods when all of their group have ended."""
        held = {one.attempt for one in self.world.workers if one.live}
        gone = [one for one in self.world.workers if one.deletion is not None and one.deletion.grace_s == 0]
        if self.job.spec.group is PodGroupKey.WORKLOAD:
            workers = tuple(one for one in self.world.workers if one not in gone or one.attempt in held)
            self.world = dataclasses.replace(self.world, workers=workers)

    def replace(self, worker: Worker, **changes: Any) -> None:
        new = dataclasses.replace(worker, **changes)
        workers = tuple(new if one == worker else one for one in self.world.workers)
        self.world = dataclasses.replace(self.world, workers=workers)


TestHistories = History.TestCase
TestHistories.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
