"""Rules about MegaDPP and MegaFBD, and about the forward workers of the latter.

The rules of forward workers see, in addition to the names of `world`, `wanted_forward` (forward ranks), `forward_nodes`
and `forward_per_node` (written or derived).
"""

from megatronapp_common.job.api.model import MAX_NODES, MAX_PROC_PER_NODE
from megatronapp_common.job.rules.cluster import named_once
from megatronapp_common.job.rules.model import CHUNKS, GIVEN_CHUNKS, IN_VEE, OWN_CHUNKS, VEE
from megatronapp_common.job.rules.rule import Rule, cel_message
from megatronapp_common.job.rules.world import APART, cel_message_with_sizes, with_gang

_FORWARD = "self.fbd.forward"
_GPUS = f"{_FORWARD}.gpusPerNode"
_RANKS = "forward_nodes * forward_per_node"
_SCHEDULE = "self.dpp.schedule"
_FIXED_ORDER = "(has(self.dpp.schedule) && self.dpp.schedule in ['static', 'zero-bubble'])"

_SWITCHES = (
    Rule(
        id="dpp-needs-pipeline",
        field=".dpp.enabled",
        rule="!self.dpp.enabled || self.parallelism.pipeline > 1",
        message="needs parallelism.pipeline above 1: there is nothing to schedule in one stage; leave it out",
    ),
    *(
        Rule(
            id=f"{name}-needs-dpp",
            field=f".dpp.{name}",
            rule=f"!has(self.dpp.{name}) || self.dpp.enabled",
            message="needs dpp.enabled: true",
        )
        for name in ("schedule", "placement", "memoryCap", "chunks", "transport", "workload")
    ),
    Rule(
        id="chunks-given-once",
        field=".dpp.chunks",
        rule=f"!has({OWN_CHUNKS}) || !has({CHUNKS}) || {OWN_CHUNKS} == {CHUNKS}",
        message="differs from parallelism.virtualPipeline, and both are the model chunks of each rank; write one",
        message_expression=cel_message(
            f"{{{OWN_CHUNKS}}} differs from parallelism.virtualPipeline {{{CHUNKS}}}, and both are the model chunks of "
            "each rank; write one"
        ),
    ),
    Rule(
        id="cap-of-free-order",
        field=".dpp.memoryCap",
        rule=f"!has(self.dpp.memoryCap) || !{_FIXED_ORDER}",
        message="means nothing with schedule static or zero-bubble, whose order is fixed; leave it out",
    ),
    Rule(
        id="zero-bubble-of-two-chunks",
        field=".dpp.schedule",
        rule=f"!has(self.dpp.schedule) || self.dpp.schedule != 'zero-bubble' || {GIVEN_CHUNKS} <= 2",
        message="zero-bubble has one chunk on each rank (ZB-H1) or two (ZB-V); write chunks: 2, or schedule: auto",
    ),
    Rule(
        id="vee-of-two-chunks",
        field=".dpp.placement",
        rule=f"!{IN_VEE} || ({GIVEN_CHUNKS} == 2 && (!has({_SCHEDULE}) || {_SCHEDULE} in ['auto', 'zero-bubble']))",
        message="vee has two chunks on each rank, and schedule auto or zero-bubble; write chunks: 2 and one of these, "
        "or leave it out",
    ),
    Rule(
        id="zero-bubble-in-vee",
        field=".dpp.placement",
        rule=f"!has(self.dpp.placement) || {IN_VEE} || !{VEE}",
        message="loop has no order of zero-bubble with two chunks (ZB-V); write vee, or schedule: auto",
    ),
    *(
        Rule(
            id=f"{name}-of-one-end",
            field=f".parallelism.{name}",
            rule=f"!has(self.parallelism.{name}) || !{VEE}",
            message="means nothing with stages in a vee (ZB-V), where the first rank has both ends of the model; leave "
            "it out",
        )
        for name in ("firstStageLayers", "lastStageLayers")
    ),
    Rule(
        id="merging-needs-fbd",
        field=".fbd.ignoreForwardTensorParallel",
        rule="!self.fbd.ignoreForwardTensorParallel || self.fbd.enabled",
        message="needs fbd.enabled: true",
    ),
    Rule(
        id="serving-needs-fbd",
        field=".fbd.backwardPerForward",
        rule="self.fbd.backwardPerForward == 1 || self.fbd.enabled",
        message="needs fbd.enabled: true",
    ),
    Rule(
        id="ship-needs-fbd",
        field=".fbd.ship",
        rule="!has(self.fbd.ship) || self.fbd.enabled",
        message="needs fbd.enabled: true",
    ),
    Rule(
        id="forward-needs-fbd",
        field=".fbd.forward",
        rule=f"!has({_FORWARD}) || self.fbd.enabled",
        message="needs fbd.enabled: true",
    ),
)
_MERGED = "(self.fbd.enabled && self.fbd.ignoreForwardTensorParallel)"
_ATTENTION, _HIDDEN = "self.model.attentionDropout", "self.model.hiddenDropout"
_SHIP, _RECOMPUTE = "self.fbd.ship", "self.training.recompute"
_FULL = f"(has({_SHIP}) ? {_SHIP} in ['full', 'auto'] : has({_RECOMPUTE}) && {_RECOMPUTE}.granularity == 'full')"
_OF_FBD = (
    Rule(  # one for all: each more would take of the bytes that a client-side apply has for the definition
        id="dpp-of-roles",
        field=".dpp.enabled",
        rule="!self.dpp.enabled || !self.fbd.enabled || (self.parallelism.tensor == 1 && !has(self.dpp.memoryCap) && "
        f"!{IN_VEE} && (!has({_SCHEDULE}) || {_SCHEDULE} != 'zero-bubble'))",
        message="with fbd.enabled needs parallelism.tensor: 1, and no memoryCap, placement vee or schedule zero-bubble",
    ),
    Rule(
        id="fbd-without-gather",
        field=".training.overlapParamGather",
        rule="!self.fbd.enabled || !self.training.overlapParamGather",
        message="cannot be combined with fbd.enabled yet; leave one of them out",
    ),
    Rule(
        id="merged-attention-dropout",
        field=".model.attentionDropout",
        rule=f"!{_MERGED} || (has({_ATTENTION}) && {_ATTENTION} == 0.0)",
        message="must be 0 with fbd.ignoreForwardTensorParallel (it is 0.1 by default): a mask of all heads cannot be "
        "divided over a tensor group; write attentionDropout: 0",
        args=("--attention-dropout",),
    ),
    Rule(
        id="merged-hidden-dropout",
        field=".model.hiddenDropout",
        rule=f"!{_MERGED} || !self.parallelism.sequenceParallel || !{_FULL} || (has({_HIDDEN}) && {_HIDDEN} == 0.0)",
        message="must be 0 with fbd.ignoreForwardTensorParallel, sequenceParallel and full recomputation (it is 0.1 by "
        "default): what backward ranks compute again would have another mask; write hiddenDropout: 0, or ship: saved",
        args=("--hidden-dropout", "--recompute-granularity", "--fbd-ship"),
    ),
)
"""Fields that the trainer refuses together with MegaFBD (`trainer/.../config/rules/fbd.py`)."""
_LAYERS = "self.model.transformerImpl"
_ON_CPU = f"(self.fbd.enabled && has({_FORWARD}) && {_GPUS} == 0 && self.gpusPerNode > 0)"
_SHIPS_FULL = (
    f"(has({_SHIP}) ? {_SHIP} == 'full' : has({_RECOMPUTE}) && {_RECOMPUTE}.granularity == 'full' && "
    f"!(has({_RECOMPUTE}.method) && {_RECOMPUTE}.method == 'block'))"
)
_NO_DROPOUT = " && ".join(f"has({dropout}) && {dropout} == 0.0" for dropout in (_ATTENTION, _HIDDEN))
_FORWARD_ON_CPU = Rule(
    id="forward-on-cpu",
    field=".fbd.forward.gpusPerNode",
    rule=f"!{_ON_CPU} || ({_SHIPS_FULL} && {_NO_DROPOUT} && (!has({_LAYERS}) || {_LAYERS} != 'transformer_engine'))",
    message="0 with GPUs for backward ranks needs fbd.ship: full, model.attentionDropout: 0 and model.hiddenDropout: 0 "
    "(they are 0.1 by default), and no transformer_engine; write these, or give forward ranks GPUs",
    args=(
        "--recompute-granularity",
        "--recompute-method",
        "--fbd-ship",
        "--attention-dropout",
        "--hidden-dropout",
        "--transformer-impl",
    ),
)
"""Fields that `--fbd-forward-on-cpu` needs, the flag of forward workers without GPUs."""


def _of_forward(rule_id: str, field: str, rule: str, *, says: str, message: str) -> Rule:
    """Return a rule about the forward workers; it passes without them, or if the backward ones are inconsistent."""
    return Rule(
        id=rule_id,
        field=field,
        rule=f"!{APART} || {with_gang(rule)}",
        message=says,
        message_expression=cel_message_with_sizes(cel_message(message)),
    )


FORWARD_RULES = (
    _of_forward(
        "forward-ranks-agree",
        ".fbd.forward",
        f"{_RANKS} == wanted_forward",
        says="nodes x procPerNode must be the number of forward ranks; leave one of them out to derive it",
        message=f"{{forward_nodes}} nodes x {{forward_per_node}} are {{{_RANKS}}} ranks, but there are "
        "{wanted_forward} forward ranks; make nodes x procPerNode equal to {wanted_forward}",
    ),
    _of_forward(
        "forward-ranks-of-a-node",
        ".fbd.forward.nodes",
        f"{_RANKS} != wanted_forward || forward_per_node <= {MAX_PROC_PER_NODE}",
        says=f"at most {MAX_PROC_PER_NODE} ranks are possible on a node; write more nodes",
        message=f"{{{_RANKS}}} ranks on {{forward_nodes}} nodes are {{forward_per_node}} on each, at most "
        f"{MAX_PROC_PER_NODE} are possible; write nodes: "
        f"{{(wanted_forward + {MAX_PROC_PER_NODE - 1}) / {MAX_PROC_PER_NODE}}} or more",
    ),
    _of_forward(
        "forward-ranks-of-gpus",
        ".fbd.forward.gpusPerNode",
        f"{_GPUS} == 0 || {_RANKS} != wanted_forward || forward_per_node > {MAX_PROC_PER_NODE} || "
        f"forward_per_node <= {_GPUS}",
        says="each rank needs its own GPU: write more nodes or GPUs, or gpusPerNode: 0 for the CPU",
        message=f"{{forward_per_node}} ranks on a node of {{{_GPUS}}} GPUs; each rank needs its own GPU: write more "
        "nodes or GPUs, or gpusPerNode: 0 for the CPU",
    ),
    _of_forward(
        "all-workers",
        ".fbd.forward.nodes",
        f"{_RANKS} != wanted_forward || nodes + forward_nodes <= {MAX_NODES}",
        says=f"at most {MAX_NODES} workers are possible, forward and backward; write smaller sizes",
        message=f"{{nodes}} backward and {{forward_nodes}} forward workers are too many; "
        f"at most {MAX_NODES} are possible",
    ),
)
"""Rules about the number of forward workers and ranks: the arithmetic of `job.world`."""
_RESOURCES = named_once(
    "forward-gpus-named-once",
    ".fbd.forward.resources",
    when=f"has({_FORWARD}) && has({_FORWARD}.resources)",
    resource="self.gpuResourceName",
    count=_GPUS,
    source="fbd.forward.gpusPerNode",
)
RUNTIME_RULES = (*_SWITCHES, *_OF_FBD, _FORWARD_ON_CPU, *FORWARD_RULES, _RESOURCES)
