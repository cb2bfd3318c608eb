"""Extraction of the plan's view of a MegatronJob, for both backends."""

import dataclasses

from megatronapp_common.job import FailureRule, MegatronJob, RunPolicy, reduced_sizes
from megatronapp_operator import plan

FAILED_GRACE_S = 30.0
"""Seconds for a worker on a cluster to end after a peer has failed: it writes no checkpoint, but logs and traces."""

GROUPS = {"None": plan.PodGroupKey.NONE, "Kueue": plan.PodGroupKey.WORKLOAD}
"""Gang schedulers without a pod group of the operator's; all others take one."""


def build_spec(job: MegatronJob, *, uid: str, generation: int = 1) -> plan.JobSpec:
    """Return the plan's view of a job on a cluster."""
    spec = job.spec
    return plan.JobSpec(
        name=job.metadata.name,
        uid=uid,
        worker_groups=job.world.worker_groups,
        generation=generation,
        hub=spec.analyzer.enabled,
        serves=spec.mode == "serve",
        hub_retain_s=spec.analyzer.retain_seconds,
        suspend=spec.suspend,
        initializers=any(initializer.scope == "Job" for initializer in spec.initializers),
        gang=spec.scheduling.gang != "None",
        group=GROUPS.get(spec.scheduling.gang, plan.PodGroupKey.POD_GROUP),
        success=plan.SuccessPolicy(spec.success_policy),
        rank_zero=0 if spec.network.rank_order == "Index" else None,
        elastic=_elastic(job),
        slow_node=_slow_node_policy(job),
        policy=_cluster_policy(spec.run_policy),
    )


def process_spec(job: MegatronJob, *, uid: str, retain_hub: bool) -> plan.JobSpec:
    """Return the plan's view of a job whose workers are processes of one node, without queue or node exclusion."""
    spec = job.spec
    return plan.JobSpec(
        name=job.metadata.name,
        uid=uid,
        worker_groups=job.world.worker_groups,
        hub=spec.analyzer.enabled,
        serves=spec.mode == "serve",
        hub_retain_s=spec.analyzer.retain_seconds if retain_hub else 0,
        success=plan.SuccessPolicy(spec.success_policy),
        policy=dataclasses.replace(run_policy(spec.run_policy), exclusion=plan.NodeExclusion(enabled=False)),
    )


def run_policy(given: RunPolicy) -> plan.RunPolicy:
    """Return the part of a run policy that holds for both backends."""
    return plan.RunPolicy(
        max_restarts=given.max_restarts,
        backoff=plan.Backoff(
            initial_s=given.backoff.initial_seconds,
            max_s=given.backoff.max_seconds,
            factor=given.backoff.factor,
        ),
        reset_after_s=given.reset_after_seconds,
        active_deadline_s=given.active_deadline_seconds,
        start_deadline_s=given.start_deadline_seconds,
        progress_deadline_s=given.progress_deadline_seconds,
        grace_s=given.termination_grace_period_seconds,
        rules=tuple(_rule(rule) for rule in given.rules),
    )


def _cluster_policy(given: RunPolicy) -> plan.RunPolicy:
    exclusion = given.node_exclusion
    return dataclasses.replace(
        run_policy(given),
        in_place=given.restart == "InPlace",
        spares=given.spares,
        disruption=plan.Disruption(given.disruption),
        checkpoint_age_s=given.checkpoint_age_seconds,
        failed_grace_s=min(FAILED_GRACE_S, given.termination_grace_period_seconds),
        lost_worker_s=given.lost_node_timeout_seconds,
        clean=plan.CleanPodPolicy(given.clean_pod_policy),
        ttl_s=given.ttl_seconds_after_finished,
        exclusion=plan.NodeExclusion(
            enabled=exclusion.enabled,
            max_nodes=exclusion.max_nodes,
            ttl_s=exclusion.ttl_seconds,
            allowed=frozenset(exclusion.allowed_nodes),
        ),
    )


def _elastic(job: MegatronJob) -> plan.Elastic | None:
    """Return the sizes of the gang; None with MegaFBD, whose workers have different roles."""
    given, world = job.spec.run_policy.elastic, job.world
    if world.fbd is not None:
        return None
    full = plan.ElasticSize(data=world.data_parallel_size, worker_groups=world.worker_groups)
    if given is None:
        return plan.Elastic(full=full)
    return plan.Elastic(
        full=full,
        smaller=tuple(full.scaled(data) for data in reduced_sizes(job)),
        patience_s=given.patience_seconds,
    )


def _slow_node_policy(job: MegatronJob) -> plan.SlowNodePolicy:
    given = job.spec.analyzer.slow_node
    return plan.SlowNodePolicy(
        action=plan.SlowNodeAction(given.action), min_slowdown=given.min_slowdown, min_s=given.min_seconds
    )


def _rule(given: FailureRule) -> plan.FailureRule:
    match = given.match
    return plan.FailureRule(
        match=plan.FailureMatch(
            exit_codes=(match.exit_codes and match.exit_codes.in_) or (),
            not_exit_codes=(match.exit_codes and match.exit_codes.not_in) or (),
            signals=match.signals or (),
            reasons=match.reasons or (),
            message_regex=match.message_regex,
            condition_types=match.condition_types or (),
            workers=match.workers or (),
        ),
        action=plan.FailureAction(given.action),
    )
