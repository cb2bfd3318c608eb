"""Plan against generated histories: a world that fails, reports falsely or late, and carries out only part of the
actions."""

import dataclasses
import json
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from plan_histories.events import JobEvents, WorkerEvents
from plan_histories.invariants import JobInvariants, check_culprit
from plan_histories.simulated_job import SimulatedJob
from pytest_workers import examples
from worker_groups import worker_groups

from megatronapp_common.job import read_status, status_document
from megatronapp_operator.plan import (
    TERMINAL_PHASES,
    Backoff,
    CleanPodPolicy,
    ConditionType,
    CreateInit,
    CreateWorker,
    DeleteInit,
    DeleteJob,
    DeleteWorker,
    Disruption,
    EnsureHub,
    FailureAction,
    FailureMatch,
    FailureRule,
    JobSpec,
    JobState,
    NodeExclusion,
    Phase,
    Plan,
    PodGroupKey,
    RecordEvent,
    RemoveGroup,
    RunPolicy,
    SlowNodeAction,
    SlowNodePolicy,
    SuccessPolicy,
    WorkerPhase,
    plan,
)
from megatronapp_operator.plan.worker_history import whole_gang

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
SOON = 1e-5
"""A plan wakes up to the microsecond."""
LONG_ENOUGH = 400
"""Wake-ups after which a silent job must have ended."""


class History(WorkerEvents, JobEvents, JobInvariants):
    """Life of one job."""

    @initialize(
        max_restarts=st.integers(0, 3),
        active=st.none() | st.floats(10, 500),
        reset=st.floats(1, 200),
        spec=st.fixed_dictionaries(
            {
                "worker_groups": GROUPS,
                "hub": st.booleans(),
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
                "disruption": st.sampled_from(Disruption),
            }
        ),
    )
    def start(
        self, *, max_restarts: int, active: float | None, reset: float, spec: dict[str, Any], end: dict[str, Any]
    ) -> None:
        policy = RunPolicy(
            max_restarts=max_restarts,
            backoff=Backoff(initial_s=5, max_s=20),
            reset_after_s=reset,
            active_deadline_s=active,
            start_deadline_s=60,
            progress_deadline_s=90,
            exclusion=NodeExclusion(max_nodes=2, ttl_s=200),
            checkpoint_age_s=20,
            **end,
        )
        self.job = SimulatedJob(JobState(spec=JobSpec(name="job", uid="u", hub_retain_s=30, policy=policy, **spec)))

    @rule(seconds=st.floats(0, 120))
    def time_passes(self, seconds: float) -> None:
        self.job.now += seconds

    @rule(carried_out=st.none() | st.integers(0, 4))
    def reconcile(self, carried_out: int | None) -> None:
        """Plan; then the backend may die after the first few actions."""
        before = self.job.state
        made = self.job.plan()
        assert made == plan(before, self.job.observed, self.job.now), "the plan must be a function"
        self.check_stored_status()
        self.check_new_failures(before, made)
        for action in made.actions[:carried_out]:
            self.job.carry_out(action)
        self.last, self.planned_before_the_stop = made, self.job.state.stop is None
        if carried_out is None:
            self.check_idempotent(made)
            self.check_wakes(made)

    @rule(data=st.data(), late=st.lists(st.floats(0, 3), min_size=4, max_size=4), ends=st.booleans())
    def gang_stops(self, data: st.DataObject, late: list[float], ends: bool) -> None:
        """Let a gang begin, and stop in order for a worker that is deleted. `ends`: False: that ends later."""
        for _ in range(3):
            self.reconcile(carried_out=None)
            self.job.run_all()
        running = [worker for worker in self.job.observed.workers if worker.phase is WorkerPhase.RUNNING]
        if running and not any(worker.deletion for worker in running):
            self.job.stop_for(data.draw(st.sampled_from(running[::-1])), late, ends=ends)
            self.reconcile(carried_out=None)

    def check_new_failures(self, before: JobState, made: Plan) -> None:
        """Check which workers this plan blames."""
        known = whole_gang(self.job.observed, before.status)
        gang = tuple(worker for worker in known if worker.attempt == before.status.attempt)
        for failure in made.status.failures:
            if failure not in before.status.failures and failure.attempt == before.status.attempt:
                check_culprit(failure, gang)

    def check_stored_status(self) -> None:
        """Check that an operator that starts again here continues as this one would."""
        written = json.loads(json.dumps(status_document(self.job.state.status)))
        assert read_status(written) == self.job.state.status

    def check_idempotent(self, made: Plan) -> None:
        job = self.job
        if any(
            isinstance(action, DeleteJob | RemoveGroup)
            or action == DeleteInit(force=True)
            or (
                isinstance(action, DeleteWorker)
                and (action.grace_s == 0 or job.state.spec.group is PodGroupKey.WORKLOAD)
            )
            for action in made.actions
        ):
            return  # what was removed by force or with a group is deleted by now, so the next plan sees another world
        again = plan(job.state, job.observed, job.now)
        if any(isinstance(action, EnsureHub | CreateInit | CreateWorker) for action in made.actions):
            # what was created is seen now for the first time; only the count of replicas may follow from it
            job.state = dataclasses.replace(job.state, status=again.status)
            assert again.actions == ()
            again = plan(job.state, job.observed, job.now)
        assert again.actions == ()
        assert dataclasses.replace(again.status, replicas=job.state.status.replicas) == job.state.status

    def check_wakes(self, made: Plan) -> None:
        """Check that all that can time out has a time of its next reconciliation."""
        status, spec = made.status, self.job.state.spec
        policy = spec.policy
        open_end = (spec.initializers and not status.initialized) or (spec.gang and status.holding_time is None)
        timed = status.phase in {Phase.STARTING, Phase.RUNNING, Phase.RESTARTING} and not open_end
        if timed:
            assert made.wake_at is not None
        deciding = timed and not status.is_true(ConditionType.FAILURE_TARGET)
        active_since = None if status.holding_time is None else status.holding_time - status.active_s
        start = active_since if spec.gang else status.start_time
        if policy.active_deadline_s is not None and start is not None and deciding:
            limit = start + policy.active_deadline_s
            assert made.wake_at is not None and (made.wake_at <= limit + SOON or limit <= self.job.now + SOON)
        if any(isinstance(action, DeleteWorker) and action.grace_s for action in made.actions):
            assert made.wake_at is not None

    def teardown(self) -> None:
        """Stop all reports, so that workers end by force alone: the job must still reach its end."""
        if not hasattr(self, "job"):
            return
        job = self.job
        self.place_all()
        job.observe(last_contact=None)
        for _ in range(LONG_ENOUGH):
            made = job.plan()
            for action in made.actions:
                job.carry_out(action)
            changes = [action for action in made.actions if not isinstance(action, RecordEvent)]
            if not changes and made.wake_at is None:
                break
            if not changes:
                assert made.wake_at is not None and made.wake_at > job.now
                job.now = made.wake_at
        else:
            raise AssertionError(f"a silent job goes on for ever: {job.state.status}")
        assert job.state.status.phase in TERMINAL_PHASES | {Phase.SUSPENDED}
        assert not any(worker.live for worker in job.observed.workers)
        assert not job.budget, "a job that has ended keeps its budget"
        assert job.state.spec.group is not PodGroupKey.POD_GROUP or not job.groups

    def place_all(self) -> None:
        """Place all workers and end the initializer: both may take any time, so the silence begins after them."""
        self.job.has_nodes = True
        for worker in self.job.observed.workers:
            self.job.change(worker, scheduled=True)
        init = self.job.observed.init
        if init is not None and init.phase is WorkerPhase.RUNNING:
            self.job.change_init(phase=WorkerPhase.SUCCEEDED)


TestHistories = History.TestCase
TestHistories.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
