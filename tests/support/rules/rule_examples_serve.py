"""Examples of the rules about mode serve."""

from rule_example import BASE, Changes, Example, bad, good, stays

SERVED: Changes = {
    "spec.mode": "serve",
    "spec.procPerNode": 2,
    "spec.model": None,
    "spec.training": None,
    "spec.data": None,
    "spec.trace": None,
    "spec.checkpoint.load": "checkpoints",
}
"""BASE as a job that serves: two stages on two nodes, one replica."""
_BERT: Changes = {
    "spec.model.type": "bert",
    "spec.data": {"tokenizerType": "BertWordPieceCase", "vocabFile": "vocab.txt"},
}
_WITH_MODEL = SERVED | {"spec.model": BASE["spec"]["model"]}


def _of_training(field: str, value: object, *more: Changes) -> list[Example]:
    """A field that only training knows: taken there, refused when serving."""
    rule_id, change = f"serve-without-{field}", {f"spec.{field}": value}
    trained: Changes = change
    served = SERVED | change
    for changes in more:
        trained = trained | changes
        served = served | changes
    return [*good(rule_id, trained, SERVED), *bad(rule_id, f"spec.{field}", (served, "means nothing in mode serve"))]


_CONTROLLED: Changes = {"spec.scope": {"training": {"startPaused": True}}, "spec.analyzer.enabled": True}
"""Changes that let a training be controlled."""
_TOKENIZER: Changes = {"spec.data.tokenizer": "tokenizer.json"}
_READS: Changes = _CONTROLLED | _TOKENIZER
"""Changes that let a training read texts, too."""


def _named(name: str, *, active: bool = False) -> dict[str, object]:
    """A recipe of a manifest."""
    action = {"type": "gaussian", "coefficient": 0.1}
    return {"name": name, "active": active, "recipe": {"perturbations": [{"kind": "system", "action": action}]}}


def _perturbed(*recipes: dict[str, object]) -> Changes:
    return SERVED | {"spec.scope": {"perturbations": list(recipes)}, "spec.analyzer.enabled": True}


SERVE_EXAMPLES: tuple[Example, ...] = (
    *good("model-given", {}, SERVED, _WITH_MODEL),
    *bad("model-given", "spec.model", ({"spec.model": None}, "is missing; write model with a block of fields")),
    *good("training-given", {}, SERVED),
    *bad("training-given", "spec.training", ({"spec.training": None}, "is missing; write training with")),
    *good("serve-of-mode-serve", SERVED | {"spec.serve": {"port": 0}}),
    *bad("serve-of-mode-serve", "spec.serve", ({"spec.serve": {}}, "belongs to mode: serve; leave it out")),
    *good("scope-of-mode-serve", SERVED | {"spec.scope": {"plugins": ["a.b"]}, "spec.analyzer.enabled": True}),
    *bad(
        "scope-of-mode-serve",
        "spec.scope",
        ({"spec.scope": {}, "spec.analyzer.enabled": True}, "belongs to mode: serve with analyzer.enabled: true"),
        ({"spec.scope": {"training": {}}, "spec.analyzer.enabled": False}, "to mode: train with analyzer.enabled"),
        (SERVED | {"spec.scope": {}, "spec.analyzer.enabled": False}, "belongs to mode: serve with analyzer.enabled"),
    ),
    *good("scope-plugins-of-mode-serve", _CONTROLLED),
    *bad(
        "scope-plugins-of-mode-serve",
        "spec.scope.plugins",
        (_CONTROLLED | {"spec.scope": {"training": {}, "plugins": ["a.b"]}}, "belongs to mode: serve, whose ranks"),
    ),
    *good("scope-training-of-mode-train", _CONTROLLED),
    *bad(
        "scope-training-of-mode-train",
        "spec.scope.training",
        (SERVED | _CONTROLLED, "means nothing in mode serve: nothing is trained"),
    ),
    *good("scope-training-enabled", _CONTROLLED | {"spec.scope": {"training": {"enabled": False}}}),
    *bad(
        "scope-training-enabled",
        "spec.scope.training.enabled",
        (
            _CONTROLLED | {"spec.scope": {"training": {"enabled": False, "startPaused": True}}},
            "is false, so that startPaused and resumeAfterSeconds mean nothing",
        ),
    ),
    *good(
        "probe-texts-after-captures",
        _READS | {"spec.scope": {"training": {"probeTexts": ["a"]}}},
        _READS | {"spec.scope": {"training": {"enabled": False, "captureEvery": 5, "probeTexts": ["a"]}}},
    ),
    *bad(
        "probe-texts-after-captures",
        "spec.scope.training.probeTexts",
        (
            _READS | {"spec.scope": {"training": {"enabled": False, "probeTexts": ["a"]}}},
            "are run after captured steps, and no step is captured",
        ),
    ),
    *good(
        "capture-not-finite-of-captures",
        _CONTROLLED | {"spec.scope": {"training": {"captureNotFinite": False}}},
        _CONTROLLED | {"spec.scope": {"training": {"enabled": False, "captureEvery": 5, "captureNotFinite": False}}},
    ),
    *bad(
        "capture-not-finite-of-captures",
        "spec.scope.training.captureNotFinite",
        (
            _CONTROLLED | {"spec.scope": {"training": {"enabled": False, "captureNotFinite": False}}},
            "is false, and no step is captured",
        ),
    ),
    *good("scope-perturbations-of-mode-serve", _CONTROLLED),
    *bad(
        "scope-perturbations-of-mode-serve",
        "spec.scope.perturbations",
        (
            _CONTROLLED | {"spec.scope": {"training": {}, "perturbations": [_named("a")]}},
            "belongs to mode: serve; perturb a training by",
        ),
    ),
    *good("perturbations-named-once", SERVED, _perturbed(_named("a"), _named("b"))),
    *bad(
        "perturbations-named-once",
        "spec.scope.perturbations",
        (_perturbed(_named("a"), _named("a")), "two recipes have one name"),
    ),
    *good("one-active-perturbation", SERVED, _perturbed(_named("a", active=True), _named("b"))),
    *bad(
        "one-active-perturbation",
        "spec.scope.perturbations",
        (_perturbed(_named("a", active=True), _named("b", active=True)), "several recipes are active"),
    ),
    *good("serve-of-gpt", SERVED, _WITH_MODEL),
    *bad(
        "serve-of-gpt",
        "spec.model.type",
        (_WITH_MODEL | {"spec.model.type": "bert"}, "bert generates no text; mode serve takes gpt alone"),
        (_WITH_MODEL | _BERT, "bert generates no text; mode serve takes gpt alone"),
    ),
    *good("serve-needs-a-checkpoint", SERVED),
    *bad(
        "serve-needs-a-checkpoint",
        "spec.checkpoint.load",
        (SERVED | {"spec.checkpoint.load": None}, "is missing; mode serve needs the directory of a checkpoint"),
    ),
    *_of_training("training", BASE["spec"]["training"]),
    *_of_training("data.path", ["corpus"]),
    *good("serve-without-data.mock", SERVED),
    *bad("serve-without-data.mock", "spec.data.mock", (SERVED | {"spec.data.mock": True}, "reads no corpus")),
    *_of_training("data.split", "98,1,1"),
    *_of_training("data.cachePath", "cache"),
    *_of_training("data.numWorkers", 1),
    *_of_training("data.eodMaskLoss", True, _TOKENIZER),
    *_of_training("data.resetPositionIds", True, _TOKENIZER),
    *_of_training("data.resetAttentionMask", True, _TOKENIZER),
    *_of_training("data.sft", True, _TOKENIZER),
    *_of_training("checkpoint.save", "out"),
    *_of_training("checkpoint.finetune", True, {"spec.checkpoint.load": "in"}),
    *_of_training("checkpoint.exitOnMissing", True, {"spec.checkpoint.load": "in"}),
    *_of_training("parallelism.virtualPipeline", 2),
    *_of_training("parallelism.sequenceParallel", True),
    *_of_training("dpp.enabled", True),
    *good("serve-without-fbd.enabled", SERVED),
    *bad(
        "serve-without-fbd.enabled",
        "spec.fbd.enabled",
        (SERVED | {"spec.fbd.enabled": True, "spec.procPerNode": 4}, "there is no backward pass"),
    ),
    *_of_training("trace.enabled", True),
    *_of_training("runPolicy.progressDeadlineSeconds", 60),
    *_of_training("successPolicy", "Rank0"),
    *good("serve-one-replica", SERVED, SERVED | {"spec.procPerNode": None, "spec.parallelism.data": 1}),
    *bad(
        "serve-one-replica",
        "spec.parallelism.data",
        (SERVED | {"spec.procPerNode": 4}, "2 replicas of the model, and a job serves one; write data: 1"),
        (SERVED | {"spec.procPerNode": None, "spec.parallelism.data": 2}, "2 replicas of the model"),
    ),
    *good("serve-ranks-by-index", SERVED | {"spec.network.rankOrder": "Index"}, {"spec.network.rankOrder": "IP"}),
    *bad(
        "serve-ranks-by-index",
        "spec.network.rankOrder",
        (SERVED | {"spec.network.rankOrder": "IP"}, "must be Index in mode serve"),
    ),
    *stays(
        "mode-stays",
        "spec.mode",
        good=[(SERVED, SERVED)],
        bad=[(_WITH_MODEL, {"spec.procPerNode": 2}, "cannot change; make a new job")],
    ),
    *stays(
        "model-stays",
        "spec.model",
        good=[(SERVED, SERVED), (_WITH_MODEL, _WITH_MODEL)],
        bad=[(SERVED, _WITH_MODEL, "cannot change, as checkpoints hold the old shape")],
    ),
    *stays("batch-stays", "spec.training.globalBatchSize", good=[(SERVED, SERVED)], bad=[]),
)
