"""Rules about optimizer, recomputation and schedules."""

from megatronapp_common.job.rules.rule import Rule, cel_message

_GATHER = "self.training.overlapParamGather"
_RECOMPUTE = "self.training.recompute"
_STEPS = "(has(self.training.lrDecayIters) ? self.training.lrDecayIters : self.training.trainIters)"
_WARMUP = "self.training.lrWarmupIters"
_STYLE = "self.training.weightDecayIncrStyle"
_GROWING = f"(has({_STYLE}) && {_STYLE} != 'constant')"
_START, _END = "self.training.startWeightDecay", "self.training.endWeightDecay"
_STARTS, _ENDS = f"has({_START})", f"has({_END})"
_LAST_PHASE = "self.training.lrWsdDecayIters"

_OVERLAP = (
    Rule(
        id="gather-needs-distributed-optimizer",
        field=".training.overlapParamGather",
        rule=f"!{_GATHER} || self.training.useDistributedOptimizer",
        message="needs useDistributedOptimizer: true",
        args=("--use-distributed-optimizer",),
    ),
    Rule(
        id="gather-needs-overlapped-reduce",
        field=".training.overlapParamGather",
        rule=f"!{_GATHER} || self.training.overlapGradReduce",
        message="needs overlapGradReduce: true",
        args=("--overlap-grad-reduce",),
    ),
)
_RECOMPUTATION = (
    Rule(
        id="recompute-full",
        field=".training.recompute",
        rule=f"!has({_RECOMPUTE}) || {_RECOMPUTE}.granularity != 'full' || "
        f"(has({_RECOMPUTE}.method) && has({_RECOMPUTE}.numLayers))",
        message="granularity full needs method (uniform or block) and numLayers; write both",
        args=("--recompute-method", "--recompute-num-layers"),
    ),
    Rule(
        id="recompute-selective",
        field=".training.recompute",
        rule=f"!has({_RECOMPUTE}) || {_RECOMPUTE}.granularity != 'selective' || "
        f"!(has({_RECOMPUTE}.method) || has({_RECOMPUTE}.numLayers))",
        message="method and numLayers belong to granularity full; leave them out",
    ),
)
_RATE = (
    Rule(
        id="min-lr-below-lr",
        field=".training.minLr",
        rule="!has(self.training.minLr) || self.training.minLr <= self.training.lr",
        message="must not be above lr",
        message_expression=cel_message(
            "{self.training.minLr} is above lr {self.training.lr}; write {self.training.lr} or less"
        ),
    ),
    Rule(
        id="one-warmup",
        field=".training.lrWarmupFraction",
        rule=f"!has(self.training.lrWarmupFraction) || !has({_WARMUP}) || {_WARMUP} == 0",
        message="lrWarmupIters is given too; leave one of them out",
    ),
    Rule(
        id="warmup-below-decay",
        field=".training.lrWarmupIters",
        rule=f"!has({_WARMUP}) || {_WARMUP} < {_STEPS}",
        message="must be below the steps of the decay (lrDecayIters, or trainIters)",
        message_expression=cel_message(
            f"{{{_WARMUP}}} must be below the {{{_STEPS}}} steps of the decay; write {{{_STEPS} / 10}}"
        ),
        args=("--lr-decay-iters",),
    ),
    Rule(
        id="wsd-needs-last-phase",
        field=".training.lrWsdDecayIters",
        rule="!has(self.training.lrDecayStyle) || self.training.lrDecayStyle != 'WSD' || "
        "has(self.training.lrWsdDecayIters)",
        message="is missing; lrDecayStyle WSD needs the steps of its last phase",
        args=("--lr-wsd-decay-iters", "--lr-wsd-decay-samples"),
    ),
)
_WEIGHT_DECAY = (
    Rule(
        id="weight-decay-growth",
        field=".training.weightDecayIncrStyle",
        rule=f"!{_GROWING} || ({_STARTS} && {_ENDS})",
        message="linear and cosine need startWeightDecay and endWeightDecay; write both",
        message_expression=cel_message(f"{{{_STYLE}}} needs startWeightDecay and endWeightDecay; write both"),
        args=("--start-weight-decay", "--end-weight-decay"),
    ),
    Rule(
        id="weight-decay-constant",
        field=".training.weightDecayIncrStyle",
        rule=f"{_GROWING} || !({_STARTS} || {_ENDS})",
        message="startWeightDecay and endWeightDecay belong to linear or cosine; write one of these, or leave them out",
        args=("--weight-decay-incr-style",),
    ),
)
TRAINING_AT_ADMISSION = (
    Rule(
        id="last-phase-within-decay",
        field=".training.lrWsdDecayIters",
        rule="!has(self.training.lrDecayStyle) || self.training.lrDecayStyle != 'WSD' || "
        f"!has({_LAST_PHASE}) || {_LAST_PHASE} <= {_STEPS}",
        message="must not be above the steps of the decay (lrDecayIters, or trainIters), whose last phase it is",
        message_expression=cel_message(
            f"{{{_LAST_PHASE}}} is above the {{{_STEPS}}} steps of the decay, whose last phase it is; "
            f"write {{{_STEPS}}} or less"
        ),
        args=(
            "--lr-decay-style",
            "--lr-decay-iters",
            "--lr-wsd-decay-iters",
            "--lr-decay-samples",
            "--lr-wsd-decay-samples",
            "--train-iters",
            "--train-samples",
        ),
    ),
    Rule(
        id="weight-decay-only-grows",
        field=".training.endWeightDecay",
        rule=f"!{_GROWING} || !{_STARTS} || !{_ENDS} || {_END} >= {_START}",
        message="must not be below startWeightDecay: weight decay can only grow",
        message_expression=cel_message(
            f"{{{_END}}} is below startWeightDecay {{{_START}}}, and weight decay can only grow; "
            f"write {{{_START}}} or more"
        ),
        args=("--start-weight-decay", "--end-weight-decay", "--weight-decay-incr-style"),
    ),
)
"""Rules that an admission policy carries: the schema has no space left for what is seldom wrong."""
TRAINING_RULES = (*_OVERLAP, *_RECOMPUTATION, *_RATE, *_WEIGHT_DECAY)
