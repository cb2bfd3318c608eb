"""Examples of the rules about what the trainer refuses, which an admission policy judges on a cluster."""

from rule_example import Changes, Example, bad, good
from rule_examples_serve import SERVED

_MOCK: Changes = {"spec.data.path": None, "spec.data.mock": True, "spec.model.vocabSize": 64}
_TOKENIZER: Changes = {"spec.data.tokenizer": "tokenizer.json"}
_VOCABULARY: Changes = {"spec.data.vocabFile": "vocab.json", "spec.data.mergeFile": "merges.txt"}
_NO_SIZE: Changes = {"spec.model.vocabSize": None}
_SFT: Changes = _TOKENIZER | {"spec.data.sft": True}
_BLEND: Changes = {"spec.data.path": ["0.3", "a", "0.7", "b"]}
_GROWING: Changes = {"spec.training.weightDecayIncrStyle": "linear"}
_PHASES: Changes = {"spec.training.lrDecayStyle": "WSD"}
_CHUNKS: Changes = {"spec.parallelism.virtualPipeline": 2}
_RAMP = "spec.training.rampupBatchSize"
_PROBED: Changes = {"spec.analyzer.enabled": True, "spec.scope.training": {"captureEvery": 5, "probeTexts": ["a b"]}}

_LAYOUT = (
    *good(
        "expert-needs-experts",
        {
            "spec.parallelism": {"tensor": 1, "expert": 2},
            "spec.model.disableBiasLinear": True,
            "spec.args": ["--num-experts", "4"],
        },
        {"spec.parallelism": {"tensor": 1, "expert": 2}, "spec.args": ["--expert-model-parallel-size=1"]},
        SERVED,
    ),
    *bad(
        "expert-needs-experts",
        "spec.parallelism.expert",
        (
            {"spec.parallelism": {"tensor": 1, "expert": 2}},
            "above 1 needs experts to share; write args: [--num-experts, N]",
        ),
        ({"spec.parallelism.expert": 2, "spec.args": ["--num-experts-2", "4"]}, "or leave it out"),
    ),
    *good(
        "ramp-of-interleaved-stages",
        _CHUNKS | {_RAMP: [4, 4, 100]},
        {_RAMP: [2, 2, 100]},
        {_RAMP: [2, 2, 100], "spec.dpp": {"enabled": True, "chunks": 2, "placement": "vee"}},
        _CHUNKS | {_RAMP: [2, 2, 100], "spec.args": ["--rampup-batch-size", "4", "4", "100"]},
    ),
    *bad(
        "ramp-of-interleaved-stages",
        _RAMP,
        (
            _CHUNKS | {_RAMP: [2, 2, 100]},
            "start 2 and increment 2 must be multiples of 4 (microBatchSize x data x pipeline), as the interleaved "
            "schedule needs; write [4, 4, ...]",
        ),
        (_CHUNKS | {_RAMP: [4, 2, 100]}, "start 4 and increment 2 must be multiples of 4"),
        (
            {_RAMP: [6, 2, 100], "spec.dpp": {"enabled": True, "chunks": 2}},
            "start 6 and increment 2 must be multiples of 4",
        ),
    ),
)
_SCHEDULES = (
    *good(
        "last-phase-within-decay",
        _PHASES | {"spec.training.lrWsdDecayIters": 100},
        _PHASES | {"spec.training.lrWsdDecayIters": 20, "spec.training.lrDecayIters": 20},
        _PHASES | {"spec.training.lrWsdDecayIters": 101, "spec.args": ["--lr-wsd-decay-iters", "10"]},
        {"spec.training.lrWsdDecayIters": 101, "spec.training.lrDecayStyle": "cosine"},
    ),
    *bad(
        "last-phase-within-decay",
        "spec.training.lrWsdDecayIters",
        (
            _PHASES | {"spec.training.lrWsdDecayIters": 101},
            "101 is above the 100 steps of the decay, whose last phase it is; write 100 or less",
        ),
        (
            _PHASES | {"spec.training.lrWsdDecayIters": 21, "spec.training.lrDecayIters": 20},
            "21 is above the 20 steps of the decay",
        ),
    ),
    *good(
        "weight-decay-only-grows",
        _GROWING | {"spec.training.startWeightDecay": 0.1, "spec.training.endWeightDecay": 0.1},
        _GROWING
        | {
            "spec.training.startWeightDecay": 0.1,
            "spec.training.endWeightDecay": 0,
            "spec.args": ["--end-weight-decay=0.2"],
        },
    ),
    *bad(
        "weight-decay-only-grows",
        "spec.training.endWeightDecay",
        (
            _GROWING | {"spec.training.startWeightDecay": 0.1, "spec.training.endWeightDecay": 0.01},
            "0.01 is below startWeightDecay 0.1, and weight decay can only grow; write 0.1 or more",
        ),
    ),
)
_DATA = (
    *good(
        "documents-need-tokenizer",
        _SFT,
        _VOCABULARY | {"spec.data.resetPositionIds": True},
        _TOKENIZER | {"spec.data.resetAttentionMask": True, "spec.data.eodMaskLoss": True},
        _MOCK | _TOKENIZER | {"spec.data.eodMaskLoss": True},
        {"spec.data.sft": True, "spec.args": ["--tokenizer-model", "tokenizer.json"]},
        _PROBED | _TOKENIZER,
    ),
    *bad(
        "documents-need-tokenizer",
        "spec.data.tokenizer",
        *(
            (change, "is missing; eodMaskLoss, resetPositionIds, resetAttentionMask, sft and scope.training.probeTexts")
            for change in (
                {"spec.data.sft": True},
                {"spec.data.eodMaskLoss": True},
                {"spec.data.resetPositionIds": True},
                {"spec.data.resetAttentionMask": True, "spec.model.vocabSize": 64},
                _MOCK | {"spec.data.eodMaskLoss": True},
                _PROBED,
            )
        ),
    ),
    *good(
        "files-need-vocabulary",
        _NO_SIZE | _TOKENIZER,
        _NO_SIZE | _VOCABULARY,
        _NO_SIZE | {"spec.args": ["--vocab-size", "64"]},
        _NO_SIZE | {"spec.args": ["--tokenizer-model=tokenizer.json"]},
    ),
    *bad(
        "files-need-vocabulary",
        "spec.data.tokenizer",
        (_NO_SIZE, "is missing; write tokenizer: tokenizer.json, or model.vocabSize for tokens of another tokenizer"),
        (_NO_SIZE | {"spec.data.path": ["0.3", "a", "0.7", "b"]}, "is missing; write tokenizer: tokenizer.json"),
    ),
    *good("sft-without-eod-mask", _SFT, _TOKENIZER | {"spec.data.eodMaskLoss": True}),
    *bad(
        "sft-without-eod-mask",
        "spec.data.eodMaskLoss",
        (_SFT | {"spec.data.eodMaskLoss": True}, "has no effect with sft, whose loss counts answers only"),
    ),
    *good(
        "sft-without-weights",
        _SFT | {"spec.data.path": ["a", "b"]},
        _BLEND,
        _SFT | _BLEND | {"spec.args": ["--data-path", "a"]},
    ),
    *bad("sft-without-weights", "spec.data.path", (_SFT | _BLEND, "holds weights, and with sft an epoch has each")),
    *good("weights-above-zero", _BLEND, {"spec.data.path": ["1e-3", "a", "1.0", "b"]}, {"spec.data.path": ["a", "b"]}),
    *bad(
        "weights-above-zero",
        "spec.data.path",
        ({"spec.data.path": ["0.3", "a", "0.0", "b"]}, "holds a weight of 0; write one above 0, or leave it and its"),
        ({"spec.data.path": ["0e3", "a", "1", "b"]}, "holds a weight of 0"),
    ),
    *good(
        "split-of-numbers",
        *({"spec.data.split": split} for split in ("969, 30 ,1", "1", ".5,0.5", "1.,0,0", "0.3,.7")),
        _MOCK | {"spec.data.split": "0,0,0"},
        {"spec.data.split": "1.2.3", "spec.args": ["--split", "9,1,0"]},
    ),
    *bad(
        "split-of-numbers",
        "spec.data.split",
        ({"spec.data.split": "0,0,0"}, "0,0,0 must have up to three numbers with some above 0; write shares of"),
        ({"spec.data.split": "0.0"}, "such as 969,30,1"),
        ({"spec.data.split": "1.2.3"}, "1.2.3 must have up to three numbers"),
        ({"spec.data.split": "1..2"}, "must have up to three numbers"),
        ({"spec.data.split": "9,."}, "must have up to three numbers"),
        ({"spec.data.split": ". ,9"}, "must have up to three numbers"),
    ),
)
ADMITTED_EXAMPLES: tuple[Example, ...] = (*_LAYOUT, *_SCHEDULES, *_DATA)
