"""Fields of a manifest that reach the plan, on a cluster and on one machine."""

import dataclasses

from megatronapp_common.job import load_job
from megatronapp_operator.plan import (
    CleanPodPolicy,
    FailureAction,
    FailureMatch,
    FailureRule,
    NodeExclusion,
    PodGroupKey,
    SlowNodeAction,
    SlowNodePolicy,
    SuccessPolicy,
)
from megatronapp_operator.plan_io.spec_reader import build_spec, process_spec

MANIFEST = """
apiVersion: megatronapp.io/v1alpha1
kind: MegatronJob
metadata: {name: job}
spec:
  nodes: 2
  procPerNode: 1
  image: trainer:1
  parallelism: {pipeline: 2}
  model: {type: gpt, numLayers: 2, hiddenSize: 8, numAttentionHeads: 1, seqLength: 8, vocabSize: 32}
  training: {microBatchSize: 1, globalBatchSize: 1, trainIters: 5, lr: 0.001}
  data: {mock: true}
  trace: {enabled: true}
  analyzer: {enabled: true, slowNode: {action: ExcludeAndRestart, minSlowdown: 1.3, minSeconds: 60}}
  suspend: true
  successPolicy: Rank0
  scheduling: {gang: Volcano}
  initializers: [{name: get, image: "get:1", command: [get], scope: Job}]
  runPolicy:
    startDeadlineSeconds: 77
    lostNodeTimeoutSeconds: 99
    ttlSecondsAfterFinished: 55
    terminationGracePeriodSeconds: 20
    cleanPodPolicy: All
    nodeExclusion: {maxNodes: 3, ttlSeconds: 44}
    rules:
      - match: {exitCodes: {in: [3]}, signals: [9], reasons: [OOMKilled], messageRegex: Xid, workers: [0]}
        action: ExcludeNodeAndRestart
      - {match: {exitCodes: {notIn: [4]}, conditionTypes: [DisruptionTarget]}, action: Ignore}
"""
RULES = (
    FailureRule(
        match=FailureMatch(exit_codes=(3,), signals=(9,), reasons=("OOMKilled",), message_regex="Xid", workers=(0,)),
        action=FailureAction.EXCLUDE_AND_RESTART,
    ),
    FailureRule(
        match=FailureMatch(not_exit_codes=(4,), condition_types=("DisruptionTarget",)), action=FailureAction.IGNORE
    ),
)


def test_a_manifest_reaches_the_plan_on_a_cluster() -> None:
    spec = build_spec(load_job(MANIFEST), uid="u", generation=4)
    assert (spec.name, spec.uid, spec.workers, spec.generation) == ("job", "u", 2, 4)
    assert (spec.hub, spec.suspend, spec.initializers, spec.gang) == (True, True, True, True)
    assert spec.group is PodGroupKey.POD_GROUP
    assert spec.success is SuccessPolicy.RANK0
    assert spec.slow_node == SlowNodePolicy(action=SlowNodeAction.EXCLUDE_AND_RESTART, min_slowdown=1.3, min_s=60)
    policy = spec.policy
    assert (policy.start_deadline_s, policy.lost_worker_s, policy.ttl_s) == (77, 99, 55)
    assert (policy.grace_s, policy.failed_grace_s, policy.clean) == (20, 20, CleanPodPolicy.ALL)
    assert policy.exclusion == NodeExclusion(max_nodes=3, ttl_s=44)
    assert policy.rules == RULES


def test_a_failed_gang_has_half_a_minute_to_end_on_a_cluster() -> None:
    manifest = MANIFEST.replace("terminationGracePeriodSeconds: 20", "terminationGracePeriodSeconds: 600")
    assert build_spec(load_job(manifest), uid="u").policy.failed_grace_s == 30


def test_kueue_holds_pods_by_a_workload_of_its_own_and_others_take_a_pod_group() -> None:
    manifest = MANIFEST.replace("{gang: Volcano}", "{gang: Kueue, queue: team}")
    assert build_spec(load_job(manifest), uid="u").group is PodGroupKey.WORKLOAD
    assert build_spec(load_job(MANIFEST.replace("gang: Volcano", "gang: KAI")), uid="u").group is PodGroupKey.POD_GROUP


def test_cluster_only_fields_are_omitted_by_the_process_backend() -> None:
    spec = process_spec(load_job(MANIFEST), uid="u", retain_hub=True)
    assert not (spec.suspend or spec.initializers or spec.gang or spec.policy.exclusion.enabled)
    assert spec.slow_node.action is SlowNodeAction.REPORT and spec.group is PodGroupKey.NONE
    assert (spec.policy.ttl_s, spec.policy.clean) == (None, CleanPodPolicy.RUNNING)
    assert (spec.success, spec.policy.rules) == (SuccessPolicy.RANK0, RULES)
    assert dataclasses.replace(spec, hub_retain_s=0) == process_spec(load_job(MANIFEST), uid="u", retain_hub=False)
