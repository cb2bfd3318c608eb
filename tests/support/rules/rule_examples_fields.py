"""Examples of the rules about names, model, training, data and checkpoints."""

from rule_example import Changes, bad, good
from rule_examples_context import CONTEXT_EXAMPLES

_MOCK: Changes = {"spec.data.path": None, "spec.data.mock": True, "spec.model.vocabSize": 64}
_SINGLE_RANK: Changes = {"spec.nodes": 1, "spec.procPerNode": 1, "spec.parallelism": {}}
_BERT: Changes = {
    "spec.model.type": "bert",
    "spec.data.tokenizerType": "BertWordPieceCase",
    "spec.data.vocabFile": "vocab.txt",
}
_WORDPIECE = "with model.type bert write tokenizerType and vocabFile, without mergeFile (or data.mock: true)"
_NOT_OF_BERT = "bert has no fbd, vee, scope, calculatePerTokenLoss, eodMaskLoss or resets"
_MOCK_BERT: Changes = {**_MOCK, "spec.model.type": "bert"}
_GATHER: Changes = {"spec.training.overlapParamGather": True}

_NAME = [
    *good("name-length", {"metadata.name": "x" * 50}),
    *bad("name-length", "metadata.name", ({"metadata.name": "x" * 51}, "is too long; write at most 50 characters")),
    *good("name-pattern", {"metadata.name": "a-1"}),
    *bad(
        "name-pattern",
        "metadata.name",
        ({"metadata.name": "a.b"}, "is not allowed; write lower-case letters"),
        ({"metadata.name": "7b"}, "a letter first and a letter or digit last"),
    ),
]
_MODEL = [
    *good(
        "bert-unsupported",
        {**_BERT, "spec.dpp.enabled": True, "spec.model.transformerImpl": "local"},
        {**_BERT, "spec.model.positionEmbeddingType": "learned_absolute", "spec.parallelism.virtualPipeline": 2},
        {**_BERT, "spec.model.seqLength": 8, "spec.model.vocabSize": 15},
        {**_MOCK_BERT, "spec.model.vocabSize": 16},
        {"spec.model.seqLength": 7},
    ),
    *bad(
        "bert-unsupported",
        "spec.model.type",
        *(
            ({**_BERT, **changes}, _NOT_OF_BERT)
            for changes in (
                {"spec.fbd.enabled": True},
                {"spec.dpp.enabled": True, "spec.dpp.schedule": "zero-bubble", "spec.parallelism.virtualPipeline": 2},
                {"spec.analyzer.enabled": True, "spec.scope.training.captureEvery": 5},
                {"spec.training.calculatePerTokenLoss": True},
                {"spec.model.positionEmbeddingType": "rope"},
                {"spec.model.transformerImpl": "transformer_engine"},
                {"spec.data.eodMaskLoss": True},
                {"spec.data.resetPositionIds": True},
                {"spec.data.resetAttentionMask": True},
                {"spec.data.sft": True},
                {"spec.model.seqLength": 7},
            )
        ),
        ({**_MOCK_BERT, "spec.model.vocabSize": 15}, "for data.mock vocabSize 16, or more"),
    ),
    *good("expert-unsupported", {"spec.parallelism.expert": 1, "spec.dpp.enabled": True}),
    *bad(
        "expert-unsupported",
        "spec.parallelism.expert",
        ({"spec.parallelism": {"tensor": 1, "expert": 2}, "spec.fbd.enabled": True}, "must be 1 with fbd and dpp"),
        ({"spec.parallelism.expert": 2, "spec.dpp.enabled": True}, "must be 1 with fbd and dpp"),
    ),
    *good(
        "hidden-size-of-heads",
        {"spec.model.hiddenSize": 68},
        {"spec.model.hiddenSize": 66, "spec.model.kvChannels": 16},
        {"spec.model.hiddenSize": 66, "spec.args": ["--kv-channels", "16"]},
    ),
    *bad(
        "hidden-size-of-heads",
        "spec.model.hiddenSize",
        ({"spec.model.hiddenSize": 66}, "66 is not a multiple of numAttentionHeads 4; write 68, or give kvChannels"),
        ({"spec.model.hiddenSize": 1}, "write 4, or give kvChannels"),
    ),
    *good("heads-of-tensor", {"spec.model.numAttentionHeads": 8}),
    *bad(
        "heads-of-tensor",
        "spec.model.numAttentionHeads",
        ({"spec.model.numAttentionHeads": 1}, "1 is not a multiple of parallelism.tensor 2; write 2"),
    ),
    *good("query-groups-divide-heads", {"spec.model.numQueryGroups": 2}),
    *bad(
        "query-groups-divide-heads",
        "spec.model.numQueryGroups",
        (
            {"spec.model.numQueryGroups": 6, "spec.model.numAttentionHeads": 8},
            "6 does not divide numAttentionHeads 8; write a divisor of it",
        ),
    ),
    *good("query-groups-of-tensor", {"spec.model.numQueryGroups": 4}, {"spec.model.numQueryGroups": 1}),
    *bad(
        "query-groups-of-tensor",
        "spec.model.numQueryGroups",
        (
            {"spec.model.numQueryGroups": 3, "spec.model.numAttentionHeads": 12, "spec.model.hiddenSize": 96},
            "3 is neither a multiple nor a divisor of parallelism.tensor 2; write 4",
        ),
    ),
    *good("ffn-of-tensor", {"spec.model.ffnHiddenSize": 128}),
    *bad(
        "ffn-of-tensor",
        "spec.model.ffnHiddenSize",
        ({"spec.model.ffnHiddenSize": 127}, "127 is not a multiple of parallelism.tensor 2; write 128"),
    ),
    *good("vocabulary-of-tensor", {"spec.model.makeVocabSizeDivisibleBy": 2}),
    *bad(
        "vocabulary-of-tensor",
        "spec.model.makeVocabSizeDivisibleBy",
        ({"spec.model.makeVocabSizeDivisibleBy": 127}, "127 is not a multiple of parallelism.tensor 2; write 128"),
        (
            {
                **_SINGLE_RANK,
                "spec.procPerNode": 3,
                "spec.parallelism": {"tensor": 3},
                "spec.model.numAttentionHeads": 3,
                "spec.model.hiddenSize": 48,
            },
            "128 is not a multiple of parallelism.tensor 3; write 129",
        ),
    ),
    *good("positions-for-sequence", {"spec.model.maxPositionEmbeddings": 32}),
    *bad(
        "positions-for-sequence",
        "spec.model.maxPositionEmbeddings",
        ({"spec.model.maxPositionEmbeddings": 16}, "16 is below seqLength 32; write 32 or more"),
    ),
    *good("virtual-pipeline-of-one", {"spec.parallelism.virtualPipeline": 2}),
    *bad(
        "virtual-pipeline-of-one",
        "spec.parallelism.virtualPipeline",
        ({"spec.parallelism.virtualPipeline": 1}, "1 is the plain schedule; leave it out, or write 2 or more"),
    ),
    *good("virtual-pipeline-needs-pipeline", {"spec.parallelism.virtualPipeline": 2}),
    *bad(
        "virtual-pipeline-needs-pipeline",
        "spec.parallelism.virtualPipeline",
        (
            {"spec.parallelism": {"tensor": 4, "virtualPipeline": 3}},
            "3 needs pipeline above 1; leave it out",
        ),
    ),
    *good(
        "layers-of-stages",
        {"spec.model.numLayers": 8, "spec.parallelism.virtualPipeline": 4},
        {"spec.model.numLayers": 5, "spec.args": ["--account-for-loss-in-pipeline-split"]},
        {"spec.model.numLayers": 5, "spec.args": ["--account-for-embedding-in-pipeline-split"]},
        {"spec.model.numLayers": 5, "spec.args": ["--decoder-first-pipeline-num-layers", "2"]},
        {"spec.model.numLayers": 5, "spec.args": ["--seed", "1", "--decoder-last-pipeline-num-layers=2"]},
    ),
    *bad(
        "layers-of-stages",
        "spec.model.numLayers",
        ({"spec.model.numLayers": 5}, "5 cannot be divided into 2 stages; write 6"),
        ({"spec.model.numLayers": 5, "spec.args": ["--decoder-first-pipeline-num-layers-2"]}, "cannot be divided"),
        (
            {"spec.model.numLayers": 6, "spec.parallelism.virtualPipeline": 2},
            "6 cannot be divided into 2 stages of 2 chunks; write 8",
        ),
    ),
    *good("firstStageLayers-needs-pipeline", {"spec.parallelism.firstStageLayers": 3}),
    *bad(
        "firstStageLayers-needs-pipeline",
        "spec.parallelism.firstStageLayers",
        ({"spec.parallelism": {"tensor": 4, "firstStageLayers": 3}}, "needs pipeline above 1"),
    ),
    *good(
        "lastStageLayers-needs-pipeline",
        {"spec.model.numLayers": 6, "spec.parallelism.lastStageLayers": 2, "spec.parallelism.virtualPipeline": 2},
    ),
    *bad(
        "lastStageLayers-needs-pipeline",
        "spec.parallelism.lastStageLayers",
        (
            {"spec.model.numLayers": 7, "spec.parallelism.lastStageLayers": 3, "spec.parallelism.virtualPipeline": 2},
            "a multiple of virtualPipeline",
        ),
    ),
    *good(
        "layers-of-uneven-stages",
        {"spec.model.numLayers": 5, "spec.parallelism.lastStageLayers": 2},
        {"spec.parallelism.firstStageLayers": 3, "spec.parallelism.lastStageLayers": 1},
        {
            "spec.parallelism": {"pipeline": 4, "firstStageLayers": 1},
            "spec.model.numLayers": 6,
            "spec.args": ["--decoder-last-pipeline-num-layers", "1"],
        },
    ),
    *bad(
        "layers-of-uneven-stages",
        "spec.model.numLayers",
        ({"spec.parallelism.firstStageLayers": 4}, "must be shared evenly by the other stages"),
        (
            {"spec.parallelism.firstStageLayers": 2, "spec.parallelism.lastStageLayers": 1},
            "must be shared evenly by the other stages",
        ),
    ),
    *good("sequence-parallel-needs-tensor", {"spec.parallelism.sequenceParallel": True}),
    *bad(
        "sequence-parallel-needs-tensor",
        "spec.parallelism.sequenceParallel",
        ({"spec.parallelism": {"pipeline": 2, "sequenceParallel": True}}, "needs tensor above 1; leave it out"),
    ),
    *good(
        "sequence-of-tensor",
        {"spec.model.seqLength": 34, "spec.parallelism.sequenceParallel": True},
        {"spec.model.seqLength": 31},
    ),
    *bad(
        "sequence-of-tensor",
        "spec.model.seqLength",
        (
            {"spec.model.seqLength": 31, "spec.parallelism.sequenceParallel": True},
            "31 is not a multiple of parallelism.tensor 2, which sequenceParallel needs; write 32",
        ),
    ),
]
_TRAINING = [
    *good(
        "gather-needs-distributed-optimizer",
        {**_GATHER, "spec.training.useDistributedOptimizer": True, "spec.training.overlapGradReduce": True},
        {**_GATHER, "spec.training.overlapGradReduce": True, "spec.args": ["--use-distributed-optimizer"]},
    ),
    *bad(
        "gather-needs-distributed-optimizer",
        "spec.training.overlapParamGather",
        ({**_GATHER, "spec.training.overlapGradReduce": True}, "needs useDistributedOptimizer: true"),
    ),
    *good(
        "gather-needs-overlapped-reduce",
        {"spec.training.overlapGradReduce": True},
        {**_GATHER, "spec.training.useDistributedOptimizer": True, "spec.args": ["--overlap-grad-reduce"]},
    ),
    *bad(
        "gather-needs-overlapped-reduce",
        "spec.training.overlapParamGather",
        ({**_GATHER, "spec.training.useDistributedOptimizer": True}, "needs overlapGradReduce: true"),
    ),
    *good(
        "recompute-full",
        {"spec.training.recompute": {"granularity": "full", "method": "uniform", "numLayers": 1}},
        {
            "spec.training.recompute": {"granularity": "full"},
            "spec.args": ["--recompute-method", "uniform", "--recompute-num-layers", "1"],
        },
    ),
    *bad(
        "recompute-full",
        "spec.training.recompute",
        ({"spec.training.recompute": {"granularity": "full", "method": "block"}}, "granularity full needs method"),
    ),
    *good("recompute-selective", {"spec.training.recompute": {"granularity": "selective"}}),
    *bad(
        "recompute-selective",
        "spec.training.recompute",
        (
            {"spec.training.recompute": {"granularity": "selective", "numLayers": 1}},
            "method and numLayers belong to granularity full; leave them out",
        ),
    ),
    *good("min-lr-below-lr", {"spec.training.minLr": 0.001}, {"spec.training.minLr": 0}),
    *bad(
        "min-lr-below-lr",
        "spec.training.minLr",
        ({"spec.training.minLr": 0.01}, "0.01 is above lr 0.001; write 0.001 or less"),
        ({"spec.training.minLr": 2}, "2 is above lr 0.001"),
    ),
    *good("one-warmup", {"spec.training.lrWarmupIters": 0, "spec.training.lrWarmupFraction": 0.1}),
    *bad(
        "one-warmup",
        "spec.training.lrWarmupFraction",
        (
            {"spec.training.lrWarmupIters": 5, "spec.training.lrWarmupFraction": 0.1},
            "lrWarmupIters is given too; leave one of them out",
        ),
    ),
    *good(
        "warmup-below-decay",
        {"spec.training.lrWarmupIters": 120, "spec.training.lrDecayIters": 200},
        {"spec.training.lrWarmupIters": 120, "spec.args": ["--lr-decay-iters", "200"]},
    ),
    *bad(
        "warmup-below-decay",
        "spec.training.lrWarmupIters",
        ({"spec.training.lrWarmupIters": 100}, "100 must be below the 100 steps of the decay; write 10"),
        ({"spec.training.lrWarmupIters": 50, "spec.training.lrDecayIters": 50}, "the 50 steps of the decay; write 5"),
    ),
    *good(
        "wsd-needs-last-phase",
        {"spec.training.lrDecayStyle": "WSD", "spec.training.lrWsdDecayIters": 10},
        {"spec.training.lrDecayStyle": "WSD", "spec.args": ["--lr-wsd-decay-iters", "10"]},
        {
            "spec.training.lrDecayStyle": "WSD",
            "spec.args": ["--train-samples", "800", "--lr-wsd-decay-samples", "80"],
        },
    ),
    *bad(
        "wsd-needs-last-phase",
        "spec.training.lrWsdDecayIters",
        ({"spec.training.lrDecayStyle": "WSD"}, "is missing; lrDecayStyle WSD needs the steps of its last phase"),
    ),
    *good(
        "weight-decay-growth",
        {
            "spec.training.weightDecayIncrStyle": "linear",
            "spec.training.startWeightDecay": 0,
            "spec.training.endWeightDecay": 0.1,
        },
        {
            "spec.training.weightDecayIncrStyle": "linear",
            "spec.training.startWeightDecay": 0,
            "spec.args": ["--end-weight-decay", "0.1"],
        },
    ),
    *bad(
        "weight-decay-growth",
        "spec.training.weightDecayIncrStyle",
        (
            {"spec.training.weightDecayIncrStyle": "linear", "spec.training.endWeightDecay": 0.1},
            "linear needs startWeightDecay and endWeightDecay; write both",
        ),
    ),
    *good(
        "weight-decay-constant",
        {"spec.training.weightDecayIncrStyle": "constant"},
        {
            "spec.training.startWeightDecay": 0,
            "spec.training.endWeightDecay": 0.1,
            "spec.args": ["--weight-decay-incr-style", "cosine"],
        },
    ),
    *bad(
        "weight-decay-constant",
        "spec.training.weightDecayIncrStyle",
        ({"spec.training.startWeightDecay": 0.1}, "startWeightDecay and endWeightDecay belong to linear or cosine"),
        (
            {"spec.training.weightDecayIncrStyle": "constant", "spec.training.endWeightDecay": 0.1},
            "write one of these, or leave them out",
        ),
    ),
]
_DATA = [
    *good(
        "data-given",
        _MOCK,
        {"spec.data.path": [], "spec.args": ["--train-data-path", "corpus"]},
        {"spec.data.path": [], "spec.args": ["--mock-data", "--vocab-size=64"]},
    ),
    *bad("data-given", "spec.data.path", ({"spec.data.path": []}, "is missing; write path: [PREFIX]")),
    *good("mock-or-path", _MOCK),
    *bad(
        "mock-or-path",
        "spec.data.mock",
        ({"spec.data.mock": True, "spec.model.vocabSize": 64}, "path is given too; leave one of them out"),
    ),
    *good("mock-needs-vocabulary", _MOCK, {**_MOCK, "spec.model.vocabSize": None, "spec.args": ["--vocab-size", "64"]}),
    *bad(
        "mock-needs-vocabulary",
        "spec.model.vocabSize",
        ({**_MOCK, "spec.model.vocabSize": None}, "is missing; data.mock needs it"),
    ),
    *(
        example
        for field in ("resetPositionIds", "resetAttentionMask", "sft")
        for example in (
            *good(f"{field}-without-mock", {f"spec.data.{field}": True, "spec.data.tokenizer": "t"}),
            *bad(
                f"{field}-without-mock",
                f"spec.data.{field}",
                ({**_MOCK, f"spec.data.{field}": True}, "data.mock holds no documents; leave it out"),
            ),
        )
    ),
    *good(
        "blend-alternates",
        {"spec.data.path": ["a", "b", "c"]},
        {"spec.data.path": ["0.3", "a", "7e-1", "b"]},
        {"spec.data.path": [argument for index in range(256) for argument in (".5", f"corpus-{index}")]},
    ),
    *bad(
        "blend-alternates",
        "spec.data.path",
        ({"spec.data.path": ["0.3", "a", "b"]}, "a blend takes a weight before every prefix"),
        ({"spec.data.path": ["0.3", "a", "b", "0.7"]}, "a blend takes a weight before every prefix"),
        ({"spec.data.path": ["a", "0.3"]}, "a blend takes a weight before every prefix"),
        ({"spec.data.path": ["a", "b", "1"]}, "a blend takes a weight before every prefix"),
        ({"spec.data.path": ["1", "2", "a", "b"]}, "a blend takes a weight before every prefix"),
        ({"spec.data.path": ["1", "a"] * 255 + ["b", "1"]}, "a blend takes a weight before every prefix"),
    ),
    *good("weight-needs-prefix", {"spec.data.path": ["0.3-of-it"]}),
    *bad("weight-needs-prefix", "spec.data.path", ({"spec.data.path": ["0.3"]}, "0.3 is a weight without a prefix")),
    *good("vocabulary-with-merges", {"spec.data.vocabFile": "v", "spec.data.mergeFile": "m"}),
    *bad(
        "vocabulary-with-merges",
        "spec.data.vocabFile",
        ({"spec.data.vocabFile": "v"}, "vocabFile and mergeFile belong together"),
        ({"spec.data.mergeFile": "m"}, "write both, or tokenizer instead"),
    ),
    *good(
        "bert-tokenizer",
        _BERT,
        _MOCK_BERT,
        {"spec.model.type": "bert", "spec.args": ["--tokenizer-type=BertWordPieceCase", "--vocab-file", "vocab.txt"]},
    ),
    *bad(
        "bert-tokenizer",
        "spec.data.tokenizerType",
        ({"spec.model.type": "bert"}, _WORDPIECE),
        ({**_BERT, "spec.data.vocabFile": None}, _WORDPIECE),
        ({**_BERT, "spec.data.tokenizerType": None}, _WORDPIECE),
        ({**_BERT, "spec.data.mergeFile": "m"}, _WORDPIECE),
        ({**_BERT, "spec.model.type": "gpt"}, "with gpt leave tokenizerType out"),
    ),
    *good("one-tokenizer", {"spec.data.tokenizer": "tokenizer.json"}),
    *bad(
        "one-tokenizer",
        "spec.data.tokenizer",
        (
            {"spec.data.vocabFile": "v", "spec.data.mergeFile": "m", "spec.data.tokenizer": "t"},
            "vocabFile is given too; leave one of them out",
        ),
    ),
    *good(
        "rope-has-no-resets",
        {"spec.model.positionEmbeddingType": "rope"},
        {
            "spec.model.positionEmbeddingType": "learned_absolute",
            "spec.data.resetPositionIds": True,
            "spec.data.tokenizer": "t",
        },
    ),
    *bad(
        "rope-has-no-resets",
        "spec.data.resetPositionIds",
        (
            {"spec.model.positionEmbeddingType": "rope", "spec.data.resetPositionIds": True},
            "has no effect on rotary positions, which are relative; leave it out",
        ),
    ),
    *good(
        "saveInterval-needs-save",
        {"spec.checkpoint": {"save": "d", "saveInterval": 10}},
        {"spec.checkpoint": {"saveInterval": 10}, "spec.args": ["--save", "d"]},
    ),
    *bad(
        "saveInterval-needs-save",
        "spec.checkpoint.saveInterval",
        ({"spec.checkpoint.saveInterval": 10}, "needs save: "),
    ),
    *good("keep-needs-save", {"spec.checkpoint": {"save": "d", "keep": 2}}),
    *bad("keep-needs-save", "spec.checkpoint.keep", ({"spec.checkpoint.keep": 2}, "needs save: DIRECTORY")),
    *good("asyncSave-needs-save", {"spec.checkpoint": {"save": "d", "asyncSave": True}}),
    *bad("asyncSave-needs-save", "spec.checkpoint.asyncSave", ({"spec.checkpoint.asyncSave": True}, "needs save: ")),
    *good("finetune-needs-load", {"spec.checkpoint": {"load": "d", "finetune": True}}),
    *bad("finetune-needs-load", "spec.checkpoint.finetune", ({"spec.checkpoint.finetune": True}, "needs load: ")),
    *good("exitOnMissing-needs-load", {"spec.checkpoint": {"load": "d", "exitOnMissing": True}}),
    *bad(
        "exitOnMissing-needs-load",
        "spec.checkpoint.exitOnMissing",
        ({"spec.checkpoint.exitOnMissing": True}, "needs load: "),
    ),
]
FIELD_EXAMPLES = (*_NAME, *_MODEL, *CONTEXT_EXAMPLES, *_TRAINING, *_DATA)
