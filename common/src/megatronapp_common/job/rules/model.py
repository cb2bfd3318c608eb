"""Rules about the model and how it is partitioned."""

from megatronapp_common.job.rules.rule import Rule, cel_message, multiple, nearest_multiple

HEADS = "self.model.numAttentionHeads"
GROUPS = "self.model.numQueryGroups"
TENSOR = "self.parallelism.tensor"
STAGES = "self.parallelism.pipeline"
CHUNKS, OWN_CHUNKS = "self.parallelism.virtualPipeline", "self.dpp.chunks"
GIVEN_CHUNKS = f"(has({CHUNKS}) ? {CHUNKS} : has({OWN_CHUNKS}) ? {OWN_CHUNKS} : 1)"
"""CEL text: model chunks of each rank; a rule refuses values that differ."""
IN_VEE = "(has(self.dpp.placement) && self.dpp.placement == 'vee')"
"""CEL text: true if a vee is asked for."""
VEE = f"({IN_VEE} || (has(self.dpp.schedule) && self.dpp.schedule == 'zero-bubble' && {GIVEN_CHUNKS} == 2))"
"""CEL text: true if stages are placed in a vee, with both ends of the model on the first rank."""
SEQUENCE = "self.parallelism.sequenceParallel"
_PADDING = "(has(self.model.makeVocabSizeDivisibleBy) ? self.model.makeVocabSizeDivisibleBy : 128)"
_PIPED = f"({STAGES} > 1 ? {GIVEN_CHUNKS} : 1)"
_PARTS = f"{STAGES} * {_PIPED}"
_FIRST, _LAST = "self.parallelism.firstStageLayers", "self.parallelism.lastStageLayers"
_UNEVEN = f"(has({_FIRST}) || has({_LAST}))"
_SHARED = f"(self.model.numLayers - (has({_FIRST}) ? {_FIRST} : 0) - (has({_LAST}) ? {_LAST} : 0))"
_SHARING = f"({STAGES} - (has({_FIRST}) ? 1 : 0) - (has({_LAST}) ? 1 : 0))"
_UNEVEN_FLAGS = (
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)
_OF_CHUNKS = f"{_PIPED} > 1 ? {cel_message(f' of {{{_PIPED}}} chunks')} : ''"


def _multiple_of_tensor(rule_id: str, field: str, *, value: str, unless: str = "", why: str = "") -> Rule:
    return multiple(rule_id, field, value=value, factor=TENSOR, named="parallelism.tensor", unless=unless, why=why)


_EXPERT, _CONTEXT = "self.parallelism.expert", "self.parallelism.context"
_POSITIONS, _LAYERS = "self.model.positionEmbeddingType", "self.model.transformerImpl"
_DROPOUT = "self.model.attentionDropout"
_NOT_OF_BERT = (
    "self.fbd.enabled",
    f"(self.dpp.enabled && {VEE})",
    "has(self.scope)",
    "self.training.calculatePerTokenLoss",
    "self.data.eodMaskLoss",
    "self.data.resetPositionIds",
    "self.data.resetAttentionMask",
    "self.data.sft",
    f"(has({_POSITIONS}) && {_POSITIONS} != 'learned_absolute')",
    f"(has({_LAYERS}) && {_LAYERS} == 'transformer_engine')",
    "self.model.seqLength < 8",
    "(self.data.mock && has(self.model.vocabSize) && self.model.vocabSize < 16)",
)
_NOT_OF_CONTEXT = (
    "self.mode == 'serve'",
    "self.model.type == 'bert'",
    "self.fbd.enabled",
    "has(self.scope)",
    f"(has({_LAYERS}) && {_LAYERS} != 'torch')",
)
_WITHOUT_CONTEXT = " || ".join(_NOT_OF_CONTEXT)
_SUPPORT = (
    Rule(
        id="bert-unsupported",
        field=".model.type",
        rule=f"self.model.type != 'bert' || !({' || '.join(_NOT_OF_BERT)})",
        message="bert has no fbd, vee, scope, calculatePerTokenLoss, eodMaskLoss or resets, no transformer_engine, and "
        "no positions but learned_absolute; leave them out, and write seqLength 8, for data.mock vocabSize 16, or more",
    ),
    Rule(
        id="context-unsupported",
        field=".parallelism.context",
        rule=f"{_CONTEXT} == 1 || !({_WITHOUT_CONTEXT})",
        message="must be 1 with model.type bert, mode serve, fbd, scope or a transformerImpl other than torch; write 1",
    ),
    Rule(
        id="context-without-attention-dropout",
        field=".model.attentionDropout",
        rule=f"{_CONTEXT} == 1 || {_WITHOUT_CONTEXT} || (has({_DROPOUT}) && {_DROPOUT} == 0.0)",
        message="must be 0 with parallelism.context above 1 (it is 0.1 by default): keys and values that go around a "
        "ring have no dropout; write attentionDropout: 0, or args: [--cp-comm-type, a2a]",
        args=("--attention-dropout", "--cp-comm-type", "--context-parallel-size"),
    ),
    Rule(
        id="sequence-of-context",
        field=".model.seqLength",
        rule=f"{_CONTEXT} == 1 || (self.model.seqLength % (2 * {_CONTEXT}) == 0 && "
        f"(!{SEQUENCE} || self.model.seqLength % ({TENSOR} * {_CONTEXT}) == 0))",
        message="must be a multiple of 2 x parallelism.context, and with sequenceParallel of tensor x context",
    ),
    Rule(
        id="expert-unsupported",
        field=".parallelism.expert",
        rule=f"{_EXPERT} == 1 || !(self.fbd.enabled || self.dpp.enabled)",
        message="must be 1 with fbd and dpp; write 1",
    ),
)
_WIDTHS = (
    multiple(
        "hidden-size-of-heads",
        ".model.hiddenSize",
        value="self.model.hiddenSize",
        factor=HEADS,
        named="numAttentionHeads",
        unless="has(self.model.kvChannels)",
        else_=", or give kvChannels",
        args=("--kv-channels",),
    ),
    _multiple_of_tensor("heads-of-tensor", ".model.numAttentionHeads", value=HEADS),
    Rule(
        id="query-groups-divide-heads",
        field=".model.numQueryGroups",
        rule=f"!has({GROUPS}) || {HEADS} % {GROUPS} == 0",
        message="must divide numAttentionHeads; write a divisor of it",
        message_expression=cel_message(
            f"{{{GROUPS}}} does not divide numAttentionHeads {{{HEADS}}}; write a divisor of it"
        ),
    ),
    Rule(
        id="query-groups-of-tensor",
        field=".model.numQueryGroups",
        rule=f"!has({GROUPS}) || {GROUPS} % {TENSOR} == 0 || {TENSOR} % {GROUPS} == 0",
        message="must be a multiple or a divisor of parallelism.tensor; write one",
        message_expression=cel_message(
            f"{{{GROUPS}}} is neither a multiple nor a divisor of parallelism.tensor {{{TENSOR}}}; "
            f"write {{{nearest_multiple(GROUPS, TENSOR)}}}"
        ),
    ),
    _multiple_of_tensor(
        "ffn-of-tensor",
        ".model.ffnHiddenSize",
        value="self.model.ffnHiddenSize",
        unless="!has(self.model.ffnHiddenSize)",
    ),
    _multiple_of_tensor("vocabulary-of-tensor", ".model.makeVocabSizeDivisibleBy", value=_PADDING),
    Rule(
        id="positions-for-sequence",
        field=".model.maxPositionEmbeddings",
        rule="!has(self.model.maxPositionEmbeddings) || self.model.maxPositionEmbeddings >= self.model.seqLength",
        message="must not be below seqLength",
        message_expression=cel_message(
            "{self.model.maxPositionEmbeddings} is below seqLength {self.model.seqLength}; "
            "write {self.model.seqLength} or more"
        ),
    ),
)
_LAYOUT = (
    Rule(
        id="virtual-pipeline-of-one",
        field=".parallelism.virtualPipeline",
        rule=f"!has({CHUNKS}) || {CHUNKS} != 1",
        message="1 is the plain schedule; leave it out, or write 2 or more",
    ),
    Rule(
        id="virtual-pipeline-needs-pipeline",
        field=".parallelism.virtualPipeline",
        rule=f"!has({CHUNKS}) || {CHUNKS} == 1 || {STAGES} > 1",
        message="needs pipeline above 1; leave it out",
        message_expression=cel_message(f"{{{CHUNKS}}} needs pipeline above 1; leave it out"),
    ),
    Rule(
        id="layers-of-stages",
        field=".model.numLayers",
        rule=f"{_UNEVEN} || self.model.numLayers % ({_PARTS}) == 0",
        message="must be a multiple of parallelism.pipeline x virtualPipeline",
        message_expression=cel_message(
            f"{{self.model.numLayers}} cannot be divided into {{{STAGES}}} stages{{{_OF_CHUNKS}}}; "
            f"write {{{nearest_multiple('self.model.numLayers', f'({_PARTS})')}}}"
        ),
        args=_UNEVEN_FLAGS,
    ),
    *(
        Rule(
            id=f"{name}-needs-pipeline",
            field=f".parallelism.{name}",
            rule=f"!has(self.parallelism.{name}) || ({STAGES} > 1 && self.parallelism.{name} % ({_PIPED}) == 0)",
            message="needs pipeline above 1, and a multiple of virtualPipeline",
        )
        for name in ("firstStageLayers", "lastStageLayers")
    ),
    Rule(
        id="layers-of-uneven-stages",
        field=".model.numLayers",
        rule=f"!{_UNEVEN} || {STAGES} == 1 || ({_SHARING} == 0 ? {_SHARED} == 0 : "
        f"{_SHARED} > 0 && {_SHARED} % ({_SHARING} * {_PIPED}) == 0)",
        message="less firstStageLayers and lastStageLayers must be shared evenly by the other stages",
        args=_UNEVEN_FLAGS,
    ),
    Rule(
        id="sequence-parallel-needs-tensor",
        field=".parallelism.sequenceParallel",
        rule=f"!{SEQUENCE} || {TENSOR} > 1",
        message="needs tensor above 1; leave it out",
    ),
    _multiple_of_tensor(
        "sequence-of-tensor",
        ".model.seqLength",
        value="self.model.seqLength",
        unless=f"!{SEQUENCE}",
        why=", which sequenceParallel needs",
    ),
)
MODEL_RULES = (*_SUPPORT, *_WIDTHS, *_LAYOUT)
MODEL_AT_ADMISSION = (
    Rule(
        id="expert-needs-experts",
        field=".parallelism.expert",
        rule=f"self.mode == 'serve' || {_EXPERT} == 1 || self.fbd.enabled || self.dpp.enabled",
        message="above 1 needs experts to share; write args: [--num-experts, N] with a multiple of it, or leave it out",
        args=("--num-experts", "--expert-model-parallel-size"),
    ),
)
"""Rules that an admission policy carries: the schema has no space left for what is seldom wrong."""
