"""Rules about queues, failures and slow nodes."""

from megatronapp_common.job.rules.rule import Rule, cel_message, no_item
from megatronapp_common.job.rules.world import WORKERS, cel_message_with_sizes, with_gang

_GANG = "self.scheduling.gang"
_RULES = "self.runPolicy.rules"
_EXCLUDES = "self.runPolicy.nodeExclusion.enabled"
_MATCHES = ("exitCodes", "signals", "reasons", "messageRegex", "conditionTypes", "workers")
_NO_MATCH = " && ".join(f"!has(one.match.{name})" for name in _MATCHES)
_CODES = "one.match.exitCodes"
_SLOW = "self.analyzer.slowNode.action"
_SPARES = "self.runPolicy.spares"
_DISRUPTION = "self.runPolicy.disruption"

_SCHEDULING = (
    Rule(
        id="kueue-needs-a-queue",
        field=".scheduling.queue",
        rule=f"{_GANG} != 'Kueue' || has(self.scheduling.queue)",
        message="is missing; Kueue needs the name of a LocalQueue of the namespace",
    ),
    Rule(
        id="queues-need-a-gang",
        field=".scheduling.gang",
        rule=f"!({_GANG} in ['None', 'Kubernetes']) || !(has(self.scheduling.queue) || "
        "has(self.scheduling.minAvailable) || has(self.scheduling.timeoutSeconds))",
        message="must say who keeps queue, minAvailable and timeoutSeconds: Kueue, Volcano, Coscheduling or KAI",
    ),
    Rule(
        id="available-workers",
        field=".scheduling.minAvailable",
        rule="!has(self.scheduling.minAvailable) || " + with_gang(f"self.scheduling.minAvailable == {WORKERS}"),
        message="must be the number of workers: a gang trains whole or not at all",
        message_expression=cel_message_with_sizes(
            cel_message(
                f"is {{self.scheduling.minAvailable}}, and a gang trains with all of its {{{WORKERS}}} workers "
                f"or not at all; leave it out or write {{{WORKERS}}}"
            )
        ),
    ),
)
_FAILURES = (
    Rule(
        id="in-place-without-queue",
        field=".runPolicy.restart",
        rule=f"self.runPolicy.restart == 'Pods' || {_GANG} == 'None'",
        message="must be Pods with scheduling.gang, which places all pods of an attempt",
    ),
    Rule(
        id="spares-restart-in-place",
        field=".runPolicy.spares",
        rule=f"{_SPARES} == 0 || self.runPolicy.restart == 'InPlace'",
        message="needs runPolicy.restart: InPlace, by which spares take places",
    ),
    Rule(
        id="spares-train",
        field=".runPolicy.spares",
        rule=f"{_SPARES} == 0 || self.mode == 'train'",
        message="must be 0 with mode: serve, whose API is at worker 0",
    ),
    Rule(
        id="spares-of-one-kind",
        field=".runPolicy.spares",
        rule=f"{_SPARES} == 0 || !self.fbd.enabled",
        message="must be 0 with fbd.enabled, whose workers have different roles",
    ),
    Rule(
        id="spares-share-checkpoints",
        field=".runPolicy.spares",
        rule=f"{_SPARES} == 0 || !has(self.checkpoint.save) || has(self.checkpoint.volume) || has(self.data.volume)",
        message="needs checkpoint.volume with checkpoint.save: on its own node a spare finds no checkpoint of others",
    ),
    Rule(
        id="checkpoint-first-saves",
        field=".runPolicy.disruption",
        rule=f"{_DISRUPTION} != 'CheckpointFirst' || (self.mode == 'train' && has(self.checkpoint.save) && "
        "has(self.checkpoint.saveInterval))",
        message="CheckpointFirst needs mode: train, checkpoint.save and checkpoint.saveInterval; write Protect where "
        "nothing is saved",
    ),
    Rule(
        id="checkpoint-first-keeps-checkpoints",
        field=".runPolicy.disruption",
        rule=f"{_DISRUPTION} != 'CheckpointFirst' || has(self.checkpoint.volume) || has(self.data.volume)",
        message="CheckpointFirst needs checkpoint.volume: a checkpoint on an emptied node is lost with it; write "
        "Protect where there is none",
    ),
    Rule(
        id="failure-rule-matches",
        field=".runPolicy.rules",
        rule=no_item(_RULES, "one", _NO_MATCH),
        message=f"holds a rule that matches nothing; write one of {', '.join(_MATCHES)} under its match",
    ),
    Rule(
        id="failure-rule-codes",
        field=".runPolicy.rules",
        rule=no_item(_RULES, "one", f"has({_CODES}) && has({_CODES}.__in__) == has({_CODES}.notIn)"),
        message="holds exitCodes that need either in or notIn; write one of them",
    ),
    Rule(
        id="failure-rule-may-exclude",
        field=".runPolicy.nodeExclusion.enabled",
        rule=f"{_EXCLUDES} || " + no_item(_RULES, "one", "one.action == 'ExcludeNodeAndRestart'"),
        message="must be true for a rule with action ExcludeNodeAndRestart",
    ),
)
_SLOW_NODES = (
    Rule(
        id="swap-needs-a-spare",
        field=".analyzer.slowNode.action",
        rule=f"{_SLOW} != 'SwapAtCheckpoint' || {_SPARES} > 0",
        message="SwapAtCheckpoint needs runPolicy.spares",
    ),
    Rule(
        id="swap-needs-checkpoints",
        field=".analyzer.slowNode.action",
        rule=f"{_SLOW} != 'SwapAtCheckpoint' || (has(self.checkpoint.save) && has(self.checkpoint.saveInterval))",
        message="SwapAtCheckpoint needs checkpoint.save and checkpoint.saveInterval",
    ),
    Rule(
        id="slow-nodes-may-be-excluded",
        field=".runPolicy.nodeExclusion.enabled",
        rule=f"{_EXCLUDES} || {_SLOW} == 'Report'",
        message="must be true for every analyzer.slowNode.action but Report",
        message_expression=cel_message(f"must be true for analyzer.slowNode.action {{{_SLOW}}}"),
    ),
    Rule(
        id="slow-nodes-need-the-analyzer",
        field=".analyzer.slowNode.action",
        rule=f"{_SLOW} == 'Report' || (self.analyzer.enabled && self.trace.enabled)",
        message="needs analyzer.enabled: true and trace.enabled: true, which find slow nodes",
    ),
)
POLICY_RULES = (*_SCHEDULING, *_FAILURES, *_SLOW_NODES)
