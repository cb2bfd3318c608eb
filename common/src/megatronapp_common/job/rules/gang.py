"""Rules that need the number of ranks or replicas. They pass while the world is inconsistent (`world`)."""

from megatronapp_common.job.rules.model import CHUNKS, GIVEN_CHUNKS, VEE
from megatronapp_common.job.rules.rule import (
    Rule,
    cel_message,
    cel_message_with,
    first_item,
    let,
    nearest_multiple,
    no_item,
)
from megatronapp_common.job.rules.world import RANKS, REPLICAS, cel_message_with_sizes, with_gang

_BATCH = "self.training.globalBatchSize"
_RAMP = "self.training.rampupBatchSize"
_STAGES = "self.parallelism.pipeline"
_STRIDE = f"self.training.microBatchSize * {REPLICAS}"  # samples of one microbatch of every replica
_GIVEN_OR_ONE = f"(has({_BATCH}) ? {_BATCH} : stride)"
_HERE = "nodes * per_node"  # without forward workers
_DETAIL = "self.trace.granularity"
_IS_LINK = "fault.kind == 'link' && has(fault.peer)"
_OF_RAMP = ("--rampup-batch-size",)
_OF_BATCHES = (
    *_OF_RAMP,
    "--micro-batch-size",
    "--global-batch-size",
    "--pipeline-model-parallel-size",
    "--num-virtual-stages-per-pipeline-rank",
    "--dpp-schedule",
    "--dpp-placement",
)
_NODES_FOR_GPUS = f"({_HERE} + self.gpusPerNode - 1) / self.gpusPerNode"


def _with_stride(rule: str) -> str:
    """Return CEL text of a rule over `stride`: the global batch must be a multiple of it."""
    return with_gang(let("stride", _STRIDE, rule))


def _message_with_stride(message: str) -> str:
    return cel_message_with_sizes(cel_message_with("stride", _STRIDE, message))


_GPUS = Rule(
    id="ranks-of-gpus",
    field=".nodes",
    rule=f"has(self.procPerNode) || self.gpusPerNode == 0 || {with_gang('per_node <= self.gpusPerNode')}",
    message="that many nodes have too few GPUs for all ranks; write more nodes",
    message_expression=cel_message_with_sizes(
        cel_message(
            f"{{nodes}} nodes of {{self.gpusPerNode}} GPUs cannot hold {{{_HERE}}} ranks; "
            f"write nodes: {{{_NODES_FOR_GPUS}}}"
        )
    ),
)
_EXPERT = "self.parallelism.expert"
_EXPERTS = Rule(
    id="expert-of-replicas",
    field=".parallelism.expert",
    rule=f"{_EXPERT} == 1 || self.fbd.enabled || {with_gang(f'{REPLICAS} % {_EXPERT} == 0')}",
    message="must divide the number of replicas (parallelism.data); write 1, or a divisor",
    message_expression=cel_message_with_sizes(
        cel_message(f"{{{_EXPERT}}} does not divide the {{{REPLICAS}}} replicas; write 1, or a divisor")
    ),
)
_BATCHES = (
    Rule(
        id="batch-of-replicas",
        field=".training.globalBatchSize",
        rule=f"!has({_BATCH}) || {_with_stride(f'{_BATCH} % stride == 0')}",
        message="must be a multiple of microBatchSize x replicas",
        message_expression=_message_with_stride(
            cel_message(
                f"{{{_BATCH}}} is not a multiple of microBatchSize {{self.training.microBatchSize}} x "
                f"{{{REPLICAS}}} replicas; write {{{nearest_multiple(_BATCH, 'stride')}}}"
            )
        ),
    ),
    Rule(
        id="batch-of-interleaved-stages",
        field=".training.globalBatchSize",
        rule=f"{GIVEN_CHUNKS} == 1 || {VEE} || "
        + _with_stride(f"{_GIVEN_OR_ONE} % stride != 0 || {_GIVEN_OR_ONE} / stride % {_STAGES} == 0"),
        message="must give a multiple of parallelism.pipeline microbatches, which the interleaved schedule needs",
        message_expression=_message_with_stride(
            cel_message(
                f"{{{_GIVEN_OR_ONE}}} gives {{{_GIVEN_OR_ONE} / stride}} microbatches, and the interleaved schedule "
                f"needs a multiple of pipeline {{{_STAGES}}}; "
                f"write {{{nearest_multiple(_GIVEN_OR_ONE, f'(stride * {_STAGES})')}}}"
            )
        ),
        args=("--num-virtual-stages-per-pipeline-rank",),
    ),
    Rule(
        id="ramp-needs-goal",
        field=".training.globalBatchSize",
        rule=f"!has({_RAMP}) || has({_BATCH})",
        message="is missing; rampupBatchSize needs it as its goal",
    ),
    Rule(
        id="ramp-of-replicas",
        field=".training.rampupBatchSize",
        rule=f"!has({_RAMP}) || !has({_BATCH}) || "
        + _with_stride(f"({_RAMP}[0] % stride == 0 && {_RAMP}[1] % stride == 0)"),
        message="start and increment must be multiples of microBatchSize x replicas",
        message_expression=_message_with_stride(
            cel_message(
                f"start {{{_RAMP}[0]}} and increment {{{_RAMP}[1]}} must be multiples of {{stride}} "
                f"(microBatchSize x data); write [{{{nearest_multiple(f'{_RAMP}[0]', 'stride')}}}, "
                f"{{{nearest_multiple(f'{_RAMP}[1]', 'stride')}}}, ...]"
            )
        ),
        args=_OF_RAMP,
    ),
    Rule(
        id="ramp-reaches-goal",
        field=".training.rampupBatchSize",
        rule=f"!has({_RAMP}) || !has({_BATCH}) || "
        + _with_stride(
            f"{_RAMP}[0] % stride != 0 || {_RAMP}[1] % stride != 0 || "
            f"({_RAMP}[0] <= {_BATCH} && ({_BATCH} - {_RAMP}[0]) % {_RAMP}[1] == 0)"
        ),
        message="must reach globalBatchSize in steps of its increment",
        message_expression=cel_message(
            f"{{{_RAMP}[0]}} does not reach globalBatchSize {{{_BATCH}}} in steps of {{{_RAMP}[1]}}"
        ),
        args=_OF_RAMP,
    ),
)


def _of_faults(rule_id: str, wrong: str, *, says: str, message: str, ranks: bool = False) -> Rule:
    """Return the rule that no fault is wrong; its message is about the first that is. `ranks`: it reads the world."""
    rule = no_item("self.faults", "fault", wrong)
    found = first_item("self.faults", "fault", wrong, message)
    return Rule(
        id=rule_id,
        field=".faults",
        rule=with_gang(rule) if ranks else rule,
        message=says,
        message_expression=cel_message_with_sizes(found) if ranks else found,
    )


_FAULTS = (
    Rule(
        id="windows-need-trace",
        field=".trace",
        rule="self.trace.enabled || !(has(self.trace.interval) || has(self.trace.continuousIterations) || "
        "has(self.trace.granularity) || has(self.trace.directory))",
        message="interval, continuousIterations, granularity and directory need enabled: true",
    ),
    Rule(
        id="windows-of-roles",
        field=".trace.granularity",
        rule=f"!self.fbd.enabled || (has({_DETAIL}) ? {_DETAIL} == 'base' : "
        "!(has(self.trace.interval) || has(self.trace.continuousIterations)))",
        message="must be base with fbd.enabled (it is full by default), whose backward ranks run no modules that could "
        "be timed; write granularity: base",
        args=("--trace-granularity",),
    ),
    Rule(
        id="directory-of-plain-pipeline",
        field=".trace.directory",
        rule=f"!has(self.trace.directory) || !(has({CHUNKS}) || self.dpp.enabled || self.fbd.enabled)",
        message="cannot be combined with virtualPipeline, dpp or fbd, for which MegatronApp's files have no place; "
        "leave it out, and write spans with megatronapp trace export JOB -o FILE",
        args=("--num-virtual-stages-per-pipeline-rank",),
    ),
    Rule(
        id="faults-need-trace",
        field=".faults",
        rule="self.faults.size() == 0 || self.trace.enabled",
        message="need trace.enabled: true",
    ),
    _of_faults(
        "fault-within-ranks",
        f"fault.rank >= {RANKS}",
        says="a rank is outside of this job's ranks",
        message=f"rank {{fault.rank}} is outside of this job's {{{RANKS}}} ranks; write 0 to {{{RANKS} - 1}}",
        ranks=True,
    ),
    _of_faults(
        "peer-within-ranks",
        f"{_IS_LINK} && fault.peer >= {RANKS}",
        says="a peer is outside of this job's ranks",
        message=f"peer {{fault.peer}} is outside of this job's {{{RANKS}}} ranks; write 0 to {{{RANKS} - 1}}",
        ranks=True,
    ),
    _of_faults(
        "peer-of-link",
        "has(fault.peer) && fault.kind != 'link'",
        says="peer belongs to kind link; leave it out",
        message="peer {fault.peer} of rank {fault.rank} belongs to kind link; leave it out",
    ),
    _of_faults(
        "peer-is-another",
        f"{_IS_LINK} && fault.peer == fault.rank && fault.peer < {RANKS}",
        says="a peer is the rank itself; write the rank it receives from",
        message="peer {fault.peer} is the rank itself; write the rank it receives from",
        ranks=True,
    ),
    _of_faults(
        "fault-within-steps",
        "fault.fromStep >= self.training.trainIters",
        says="fromStep is never reached by trainIters; write less",
        message="fromStep {fault.fromStep} of rank {fault.rank} is never reached by trainIters "
        "{self.training.trainIters}; write less",
    ),
)
GANG_RULES = (_GPUS, _EXPERTS, *_BATCHES, *_FAULTS)
_ROUND = f"(stride * {_STAGES})"
GANG_AT_ADMISSION = (
    Rule(
        id="ramp-of-interleaved-stages",
        field=".training.rampupBatchSize",
        rule=f"!has({_RAMP}) || !has({_BATCH}) || {GIVEN_CHUNKS} == 1 || {VEE} || "
        + _with_stride(
            f"{_RAMP}[0] % stride != 0 || {_RAMP}[1] % stride != 0 || "
            f"({_RAMP}[0] % {_ROUND} == 0 && {_RAMP}[1] % {_ROUND} == 0)"
        ),
        message="start and increment must give multiples of parallelism.pipeline microbatches, which the interleaved "
        "schedule needs",
        message_expression=_message_with_stride(
            cel_message(
                f"start {{{_RAMP}[0]}} and increment {{{_RAMP}[1]}} must be multiples of {{{_ROUND}}} (microBatchSize "
                f"x data x pipeline), as the interleaved schedule needs; write "
                f"[{{{nearest_multiple(f'{_RAMP}[0]', _ROUND)}}}, {{{nearest_multiple(f'{_RAMP}[1]', _ROUND)}}}, ...]"
            )
        ),
        args=_OF_BATCHES,
    ),
)
"""Rules that an admission policy carries: the schema has no space left for what is seldom wrong."""
