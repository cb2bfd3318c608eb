"""Rules about data and checkpoints."""

from megatronapp_common.job.rules.rule import Rule, cel_message, let, no_item

_PATH = "self.data.path"
_MOCK = "self.data.mock"
_WORDPIECE = "has(self.data.tokenizerType)"
_VOCAB, _MERGE = "has(self.data.vocabFile)", "has(self.data.mergeFile)"
_WEIGHT = "matches('^[0-9]*[.]?[0-9]+([eE]-?[0-9]+)?$')"
_SIXTEEN = ", ".join(map(str, range(16)))
_PAIR = "32 * i + 2 * j"  # lists have no positions in CEL; path holds at most 512 items, so 16 x 16 pairs are all
_SAME_PAIRS = (
    f"[{_SIXTEEN}].all(i, [{_SIXTEEN}].all(j, {_PAIR} >= weights.size() || (weights[{_PAIR}] == weights[0] "
    f"&& ({_PAIR} + 1 >= weights.size() || !weights[{_PAIR} + 1]))))"
)
_BLENDED = let(  # each word is matched once only: twice would pass the API server's limit of cost
    "weights", f"{_PATH}.map(word, word.{_WEIGHT})", f"(!weights[0] || weights.size() % 2 == 0) && {_SAME_PAIRS}"
)


def _belongs_to(option: str, place: str, *, given: str | None = None) -> Rule:
    """Return the rule that an option of checkpoint needs its directory."""
    return Rule(
        id=f"{option}-needs-{place}",
        field=f".checkpoint.{option}",
        rule=f"!{given or f'self.checkpoint.{option}'} || has(self.checkpoint.{place})",
        message=f"needs {place}: DIRECTORY",
        args=(f"--{place}",),
    )


def _not_with_mock(option: str) -> Rule:
    return Rule(
        id=f"{option}-without-mock",
        field=f".data.{option}",
        rule=f"!{_MOCK} || !self.data.{option}",
        message="data.mock holds no documents; leave it out",
    )


_SOURCE = (
    Rule(
        id="data-given",
        field=".data.path",
        rule=f"self.mode != 'train' || {_PATH}.size() > 0 || {_MOCK}",
        message="is missing; write path: [PREFIX] (made by `megatronapp data prepare`), or mock: true",
        args=("--data-path", "--train-data-path", "--mock-data"),
    ),
    Rule(
        id="mock-or-path",
        field=".data.mock",
        rule=f"!{_MOCK} || {_PATH}.size() == 0",
        message="path is given too; leave one of them out",
    ),
    Rule(
        id="mock-needs-vocabulary",
        field=".model.vocabSize",
        rule=f"!{_MOCK} || has(self.model.vocabSize)",
        message="is missing; data.mock needs it, for example vocabSize: 1024",
        args=("--vocab-size",),
    ),
    _not_with_mock("resetPositionIds"),
    _not_with_mock("resetAttentionMask"),
    _not_with_mock("sft"),
    Rule(
        id="blend-alternates",
        field=".data.path",
        rule=f"{_PATH}.size() < 2 || {_BLENDED}",
        message='a blend takes a weight before every prefix, as in ["0.3", "a", "0.7", "b"]',
    ),
    Rule(
        id="weight-needs-prefix",
        field=".data.path",
        rule=f"{_PATH}.size() != 1 || !{_PATH}[0].{_WEIGHT}",
        message="a weight has no prefix; write the prefix of the .bin/.idx files",
        message_expression=cel_message(
            f"{{{_PATH}[0]}} is a weight without a prefix; write the prefix of the .bin/.idx files"
        ),
    ),
)
_TOKENIZER = (
    Rule(
        id="vocabulary-with-merges",
        field=".data.vocabFile",
        rule=f"{_VOCAB} == {_MERGE} || {_WORDPIECE} || self.model.type == 'bert'",
        message="vocabFile and mergeFile belong together; write both, or tokenizer instead",
    ),
    Rule(
        id="bert-tokenizer",
        field=".data.tokenizerType",
        rule=f"self.model.type == 'bert' ? self.mode == 'serve' || ({_WORDPIECE} ? {_VOCAB} && !{_MERGE} : {_MOCK}) "
        f": !{_WORDPIECE}",
        message="with model.type bert write tokenizerType and vocabFile, without mergeFile (or data.mock: true); with "
        "gpt leave tokenizerType out",
        args=("--tokenizer-type", "--mock-data", "--vocab-file"),
    ),
    Rule(
        id="one-tokenizer",
        field=".data.tokenizer",
        rule=f"!has(self.data.tokenizer) || !{_VOCAB}",
        message="vocabFile is given too; leave one of them out",
    ),
    Rule(
        id="rope-has-no-resets",
        field=".data.resetPositionIds",
        rule="!self.data.resetPositionIds || !has(self.model.positionEmbeddingType) || "
        "self.model.positionEmbeddingType != 'rope'",
        message="has no effect on rotary positions, which are relative; leave it out",
    ),
)
_CHECKPOINT = (
    _belongs_to("saveInterval", "save", given="has(self.checkpoint.saveInterval)"),
    _belongs_to("asyncSave", "save"),
    _belongs_to("memorySaveInterval", "save", given="has(self.checkpoint.memorySaveInterval)"),
    Rule(
        id="memory-stays",
        field=".checkpoint.memorySaveInterval",
        rule="!has(self.checkpoint.memorySaveInterval) || self.runPolicy.restart == 'InPlace'",
        message="needs runPolicy.restart: InPlace, and so no scheduling.gang: new pods have no saves in their memory",
    ),
    Rule(
        id="memory-without-fbd",
        field=".checkpoint.memorySaveInterval",
        rule="!has(self.checkpoint.memorySaveInterval) || !self.fbd.enabled",
        message="does not work with fbd.enabled, whose forward ranks have no optimizer; leave it out, and write "
        "asyncSave: true and a short saveInterval",
    ),
    _belongs_to("keep", "save", given="has(self.checkpoint.keep)"),
    _belongs_to("finetune", "load"),
    _belongs_to("exitOnMissing", "load"),
)
_SPLIT = "self.data.split"
_READS_FILES = f"self.mode == 'train' && !{_MOCK} && {_PATH}.size() > 0"
_POSITIONS = "self.model.positionEmbeddingType"
_ROPE = f"(has({_POSITIONS}) && {_POSITIONS} == 'rope')"
_DOCUMENTS = f"(self.data.sft || (self.data.resetPositionIds && !{_ROPE}) || self.data.resetAttentionMask)"
_PROBED = "(has(self.scope) && has(self.scope.training) && self.scope.training.probeTexts.size() > 0)"
_NEEDS_TOKENIZER = f"(self.data.eodMaskLoss || (!{_MOCK} && {_DOCUMENTS}) || {_PROBED})"
DATA_AT_ADMISSION = (
    Rule(
        id="documents-need-tokenizer",
        field=".data.tokenizer",
        rule=f"self.mode == 'serve' || self.model.type == 'bert' || has(self.data.tokenizer) || {_VOCAB} || "
        f"!{_NEEDS_TOKENIZER}",
        message="is missing; eodMaskLoss, resetPositionIds, resetAttentionMask, sft and scope.training.probeTexts need "
        "it, for example tokenizer: tokenizer.json",
        args=("--tokenizer-file", "--tokenizer-model", "--vocab-file"),
    ),
    Rule(
        id="files-need-vocabulary",
        field=".data.tokenizer",
        rule=f"!({_READS_FILES}) || self.model.type == 'bert' || has(self.data.tokenizer) || {_VOCAB} || "
        f"has(self.model.vocabSize) || {_NEEDS_TOKENIZER}",
        message="is missing; write tokenizer: tokenizer.json, or model.vocabSize for tokens of another tokenizer",
        args=("--vocab-size", "--tokenizer-file", "--tokenizer-model", "--vocab-file"),
    ),
    Rule(
        id="sft-without-eod-mask",
        field=".data.eodMaskLoss",
        rule="self.mode == 'serve' || self.model.type == 'bert' || !self.data.sft || !self.data.eodMaskLoss",
        message="has no effect with sft, whose loss counts answers only; leave it out",
    ),
    Rule(
        id="sft-without-weights",
        field=".data.path",
        rule=f"!({_READS_FILES}) || !self.data.sft || {_PATH}.size() < 2 || !{_PATH}[0].{_WEIGHT}",
        message="holds weights, and with sft an epoch has each conversation once; write prefixes alone",
        args=("--data-path",),
    ),
    Rule(
        id="weights-above-zero",
        field=".data.path",
        rule=f"!({_READS_FILES}) || self.data.sft || {_PATH}.size() < 2 || !{_PATH}[0].{_WEIGHT} || "
        + no_item(_PATH, "word", f"word.{_WEIGHT} && !word.matches('^[^eE]*[1-9]')"),
        message="holds a weight of 0; write one above 0, or leave it and its prefix out",
        args=("--data-path",),
    ),
    Rule(
        id="split-of-numbers",
        field=".data.split",
        rule=f"!({_READS_FILES}) || !has({_SPLIT}) || ({_SPLIT}.matches('[1-9]') && "
        f"!{_SPLIT}.matches('[.][0-9]*[.]') && !{_SPLIT}.matches('(^|,)[^0-9,]*(,|$)'))",
        message="must have up to three numbers with some above 0, such as 969,30,1",
        message_expression=cel_message(
            f"{{{_SPLIT}}} must have up to three numbers with some above 0; write shares of training, validation and "
            "test such as 969,30,1"
        ),
        args=("--split", "--data-path"),
    ),
)
"""Rules that an admission policy carries: the schema has no space left for what is seldom wrong."""
DATA_RULES = (*_SOURCE, *_TOKENIZER, *_CHECKPOINT)
