"""The plan: one pure, total function for every backend.

It reads only its arguments, so a backend may call it at any time, and it never assumes that an earlier action was
carried out. Policies run in order until one returns True. The order is part of the policy: the terminal guard is first,
and nothing is created before everything stale is deleted.
"""

import dataclasses
from collections.abc import Callable

from megatronapp_common.job.api.status import Status
from megatronapp_operator.plan.actions import Action, Plan, RecordEvent
from megatronapp_operator.plan.observed import Observed, ProfileState
from megatronapp_operator.plan.plan_builder import PlanBuilder
from megatronapp_operator.plan.policies import (
    deadlines,
    disruption,
    elastic,
    exclusion,
    gang,
    group_removal,
    in_place,
    initialize,
    lifecycle,
    placement,
    report,
    slow_nodes,
    spares,
    time_use,
    user_actions,
)
from megatronapp_operator.plan.spec import JobSpec, JobState
from megatronapp_operator.plan.worker_history import micros

POLICIES: tuple[Callable[[PlanBuilder], bool], ...] = (
    lifecycle.delete_job,
    lifecycle.guard_terminal,
    lifecycle.guard_stopped,
    gang.created,
    lifecycle.resume,
    gang.judge_success,
    deadlines.active,
    lifecycle.stop_on_request,
    lifecycle.finish_failing,
    lifecycle.suspend,
    gang.ensure_hub,
    placement.judge_change,
    placement.judge_refusal,
    gang.judge_end,
    gang.judge_missing,
    gang.judge_lost_node,
    slow_nodes.slow_nodes,
    elastic.order_end,
    spares.judge_takeovers,
    elastic.grow,
    gang.clear_stale,
    initialize.initialize,
    gang.create,
    gang.running,
    spares.replenish,
    elastic.shrink,
    placement.judge_start,
    in_place.judge_rejoining,
    deadlines.silence,
    deadlines.gathering,
    deadlines.progress,
)

MAX_PASSES = 8
"""Twice the longest chain of decisions in one instant: a failure, the budget, the end, and a pass that confirms it."""


def plan(job: JobState, observed: Observed, now: float) -> Plan:
    """Return what to do about `job`, given what exists of it, at `now` (seconds since the epoch, never decreasing).

    Passes repeat until the status is stable. The actions are those of the last pass, so feeding the status back gives
    the same actions, and observing them done gives none. Events mark transitions and are kept from every pass.
    """
    now = micros(now)
    status, events = job.status, list[Action]()
    for _ in range(MAX_PASSES):
        draft = _single_pass(job, observed, now, status)
        if draft.status == status:
            break
        events += [action for action in draft.actions if isinstance(action, RecordEvent)]
        status = draft.status
    return Plan(actions=(*events, *draft.actions), status=status, wake_at=min(draft.wakes, default=None))


def wait_for_profile(status: Status, profile: ProfileState, now: float, *, generation: int) -> Plan:
    """Return the status and events of a job that has never begun, and whose spec is not known without its profile."""
    spec = JobSpec(name="", uid="", worker_groups=(), generation=generation)
    draft = PlanBuilder(job=JobState(spec=spec), observed=Observed(profile=profile), now=micros(now), status=status)
    report.profiles(draft)
    return Plan(actions=tuple(draft.actions), status=draft.status, wake_at=None)


def _single_pass(job: JobState, observed: Observed, now: float, status: Status) -> PlanBuilder:
    job = dataclasses.replace(job, spec=job.spec.at(status))
    draft = PlanBuilder(job=job, observed=observed, now=now, status=status)
    report.replicas(draft)
    report.profiles(draft)
    report.volumes(draft)
    report.ends(draft)
    report.rank_zero(draft)
    report.removals(draft)
    placement.record_placement(draft)
    report.progress(draft)
    report.hub(draft)
    report.tokens(draft)
    report.slow_ranks(draft)
    report.stalls(draft)
    user_actions.report_pause(draft)
    report.shared_memory(draft)
    user_actions.controls(draft)
    exclusion.expire(draft)
    for policy in POLICIES:
        if policy(draft):
            break
    elastic.report(draft)
    group_removal.remove(draft)
    disruption.guard(draft)
    time_use.account(draft)
    return draft
