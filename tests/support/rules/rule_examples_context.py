"""Examples of the rules about ranks that share a sequence."""

from rule_example import Changes, Example, bad, good

_BERT: Changes = {
    "spec.model.type": "bert",
    "spec.data.tokenizerType": "BertWordPieceCase",
    "spec.data.vocabFile": "vocab.txt",
}
_SHARED: Changes = {"spec.parallelism": {"tensor": 1, "context": 2}, "spec.model.attentionDropout": 0}
"""Two ranks share each sequence."""

CONTEXT_EXAMPLES: tuple[Example, ...] = (
    *good(
        "context-unsupported",
        {"spec.parallelism.context": 1, **_BERT},
        {
            "spec.parallelism": {"tensor": 1, "context": 2, "pipeline": 2},
            "spec.dpp.enabled": True,
            "spec.model.transformerImpl": "torch",
            "spec.model.attentionDropout": 0,
        },
    ),
    *bad(
        "context-unsupported",
        "spec.parallelism.context",
        *(
            (
                {"spec.parallelism": {"tensor": 1, "context": 2}, **changes},
                "must be 1 with model.type bert",
            )
            for changes in (
                _BERT,
                {"spec.fbd.enabled": True},
                {"spec.model.transformerImpl": "local"},
                {"spec.analyzer.enabled": True, "spec.scope.training.captureEvery": 5},
            )
        ),
    ),
    *good(
        "context-without-attention-dropout",
        _SHARED,
        _SHARED | {"spec.model.attentionDropout": None, "spec.args": ["--attention-dropout=0"]},
        _SHARED | {"spec.model.attentionDropout": 0.1, "spec.args": ["--cp-comm-type", "a2a"]},
        {"spec.model.attentionDropout": 0.1},
    ),
    *bad(
        "context-without-attention-dropout",
        "spec.model.attentionDropout",
        (_SHARED | {"spec.model.attentionDropout": None}, "it is 0.1 by default"),
        (
            _SHARED | {"spec.model.attentionDropout": 0.1, "spec.args": ["--hidden-dropout", "0"]},
            "write attentionDropout: 0, or args: [--cp-comm-type, a2a]",
        ),
    ),
    *good(
        "sequence-of-context",
        _SHARED | {"spec.model.seqLength": 12},
        _SHARED
        | {"spec.model.seqLength": 8, "spec.parallelism": {"tensor": 4, "context": 2, "sequenceParallel": True}},
        _SHARED | {"spec.model.seqLength": 12, "spec.parallelism": {"tensor": 4, "context": 2}},
    ),
    *bad(
        "sequence-of-context",
        "spec.model.seqLength",
        (_SHARED | {"spec.model.seqLength": 10}, "a multiple of 2 x"),
        (
            _SHARED
            | {"spec.model.seqLength": 12, "spec.parallelism": {"tensor": 4, "context": 2, "sequenceParallel": True}},
            "and with sequenceParallel of tensor x context",
        ),
    ),
)
