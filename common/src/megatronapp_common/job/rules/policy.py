"""Rules about queues, failures, sizes of the gang, and slow nodes."""

from megatronapp_common.job.rules.cluster import lies_on
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
_JOB = "object.spec"
_ELASTIC = f"{_JOB}.runPolicy.elastic"
_QUEUE = f"{_JOB}.scheduling.gang"
_LEAST = f"{_ELASTIC}.minData"
_SAME_SIZE = f"has({_JOB}.profile) || !has({_ELASTIC})"
"""CEL text: the gang has one size; a spec with a profile is judged once it is merged."""
_NO_TRAINING = f"{_JOB}.mode == 'serve' || !has({_JOB}.training)"
_BATCH, _RAMP = f"{_JOB}.training.globalBatchSize", f"{_JOB}.training.rampupBatchSize"
_MICRO, _DATA = f"{_JOB}.training.microBatchSize", f"{_JOB}.parallelism.data"
_WRITTEN = f"has({_JOB}.nodes) && has({_DATA}) && has({_BATCH})"
_PATIENCE, _DEADLINE = f"{_ELASTIC}.patienceSeconds", f"{_JOB}.runPolicy.startDeadlineSeconds"
_STORED = "({} || {})".format(
    *(lies_on("self.checkpoint.save", f"self.{part}.volume") for part in ("checkpoint", "data"))
)
"""CEL text: checkpoints are written to a volume of the job, which outlives its pods."""
LISTED = 16
"""Largest size that a message about an impossible `minData` names."""
SIZED_FLAGS = (
    "--micro-batch-size",
    "--global-batch-size",
    "--rampup-batch-size",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--expert-model-parallel-size",
    "--profile-ranks",
    "--hf-dataset",
    "--replication-jump",
    "--replication-factor",
    "--node-ips",
    "--multi-node",
    "--forward-backward-disaggregating",
    "--use-dpp",
)
"""Flags that would decide in `spec.args` which sizes are possible: a trainer that refuses its size fails the job."""


def _possible(size: str) -> str:
    """Return CEL text: a gang of this many replicas can train the whole batch on whole nodes."""
    chunks = f"(has({_JOB}.parallelism.virtualPipeline) ? {_JOB}.parallelism.pipeline : 1)"
    stride = f"({_MICRO} * {size} * {chunks})"
    ramp = f"has({_RAMP}) ? {_RAMP}[0] % {stride} + {_RAMP}[1] % {stride} : 0"
    rests = f"{_JOB}.nodes * {size} % {_DATA} + {size} % {_JOB}.parallelism.expert"
    return f"{size} < {_DATA} && {rests} + {_BATCH} % {stride} + ({ramp}) == 0"


_POSSIBLE_SIZES = f"[{', '.join(map(str, range(1, LISTED + 1)))}].filter(size, {_possible('size')})"
_FLAGS = ", ".join(f"'{flag}'" for flag in SIZED_FLAGS)

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
        message="must be the number of workers: a gang trains with all of its workers or with none",
        message_expression=cel_message_with_sizes(
            cel_message(
                f"is {{self.scheduling.minAvailable}}, and a gang trains with all of its {{{WORKERS}}} workers "
                f"or with none; leave it out or write {{{WORKERS}}}"
            )
        ),
    ),
)
_FAILURES = (
    Rule(
        id="in-place-without-queue",
        field=".runPolicy.restart",
        rule=f"self.runPolicy.restart == 'Pods' || {_GANG} == 'None'",
        message="must be Pods with scheduling.gang, which places all pods of an attempt; leave out spares and elastic, "
        "too",
    ),
    Rule(
        id="spares-restart-in-place",
        field=".runPolicy.spares",
        rule=f"{_SPARES} == 0 || self.runPolicy.restart == 'InPlace'",
        message="needs runPolicy.restart: InPlace, by which spares take places, and no scheduling.gang",
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
        id="checkpoints-outlive-nodes",
        field=".checkpoint.save",
        rule=f"!has(self.checkpoint.save) || ({_SPARES} == 0 && {_DISRUPTION} != 'CheckpointFirst') || {_STORED}",
        message="must be below the mountPath of checkpoint.volume with runPolicy.spares or disruption: "
        "CheckpointFirst, which replace nodes: a checkpoint elsewhere is lost with its pod",
        message_expression=cel_message(
            "{self.checkpoint.save} is not below the mountPath of checkpoint.volume, as runPolicy.spares and "
            "disruption: CheckpointFirst need it: a checkpoint elsewhere is lost with its pod"
        ),
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
ELASTIC_RULES = (
    Rule(
        id="elastic-without-queue",
        field=".runPolicy.elastic",
        rule=f"{_SAME_SIZE} || {_QUEUE} == 'None'",
        message="cannot be used with scheduling.gang: a queue admits a fixed number of pods for an attempt, and the "
        "number of spares varies; leave one of them out",
        message_expression=(
            f"'cannot be used with scheduling.gang: ' + {_QUEUE} + ', which admits a fixed number of pods for an "
            "attempt, and the number of spares varies; leave one of them out'"
        ),
    ),
    Rule(
        id="elastic-trains-in-place",
        field=".runPolicy.elastic",
        rule=f"{_SAME_SIZE} || ({_JOB}.mode == 'train' && ({_JOB}.runPolicy.restart == 'InPlace' || "
        f"{_QUEUE} != 'None') && !{_JOB}.fbd.enabled && !{_JOB}.dpp.enabled && {_JOB}.faults.size() == 0)",
        message="needs mode: train and runPolicy.restart: InPlace, without fbd.enabled, dpp.enabled and faults",
    ),
    Rule(
        id="elastic-saves",
        field=".runPolicy.elastic",
        rule=f"{_SAME_SIZE} || {_NO_TRAINING} || (has({_JOB}.checkpoint.save) && "
        f"has({_JOB}.checkpoint.saveInterval) && {_STORED.replace('self', _JOB)})",
        message="needs checkpoint.saveInterval, checkpoint.volume, and checkpoint.save below its mountPath: a gang of "
        "another size resumes from the checkpoints of the one before",
    ),
    Rule(
        id="elastic-batch-in-fields",
        field=".args",
        rule=f"{_SAME_SIZE} || "
        + no_item(f"{_JOB}.args", "word", f"[{_FLAGS}].exists(flag, word == flag || word.startsWith(flag + '='))"),
        message="must hold no flag of batches or of the layout with runPolicy.elastic, which are fields of training "
        "and parallelism, none of --profile-ranks, --hf-dataset, --replication-jump, --replication-factor, --node-ips "
        "and --multi-node, which are for one number of replicas, and neither --use-dpp nor "
        "--forward-backward-disaggregating",
    ),
    Rule(
        id="elastic-sizes-are-written",
        field=".runPolicy.elastic",
        rule=f"{_SAME_SIZE} || {_NO_TRAINING} || ({_WRITTEN})",
        message="needs nodes, parallelism.data and training.globalBatchSize, which are divided or stay",
    ),
    Rule(
        id="elastic-size",
        field=".runPolicy.elastic.minData",
        rule=f"{_SAME_SIZE} || {_NO_TRAINING} || !({_WRITTEN}) || {_possible(_LEAST)}",
        message="must be below parallelism.data, fill whole nodes, be a multiple of parallelism.expert, and divide the "
        "batch",
        message_expression=(
            "'%s replicas cannot replace %s: they must be fewer, fill whole nodes, be a multiple of "
            f"parallelism.expert, and divide the batch; possible up to {LISTED}: %s'"
            f".format([string({_LEAST}), string({_DATA}), {_POSSIBLE_SIZES}])"
        ),
    ),
    Rule(
        id="elastic-copies",
        field=".runPolicy.elastic.minData",
        rule=f"{_SAME_SIZE} || {_NO_TRAINING} || !({_WRITTEN}) || "
        f"!{_JOB}.args.exists(word, word == '--replication') || {_JOB}.nodes * {_LEAST} >= 2 * {_DATA}",
        message="must leave 2 workers or more with --replication, which stores copies in the memory of another worker",
    ),
    Rule(
        id="elastic-patience",
        field=".runPolicy.elastic.patienceSeconds",
        rule=f"{_SAME_SIZE} || {_PATIENCE} < {_DEADLINE}",
        message="must be below runPolicy.startDeadlineSeconds, after which all workers are released",
    ),
)
"""Rules over `object` about the sizes of the gang, which an admission policy carries: the schema has no space left."""
POLICY_RULES = (*_SCHEDULING, *_FAILURES, *_SLOW_NODES)
