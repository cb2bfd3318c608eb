"""Rules about the mode of a job: fields that training requires, and fields without meaning for a served model."""

from megatronapp_common.job.rules.rule import Rule, cel_message
from megatronapp_common.job.rules.world import REPLICAS, cel_message_with_sizes, with_gang

_TRAINS, _SERVES = "self.mode == 'train'", "self.mode == 'serve'"


def _needed(block: str) -> Rule:
    return Rule(
        id=f"{block}-given",
        field=f".{block}",
        rule=f"!({_TRAINS}) || has(self.{block})",
        message=f"is missing; write {block} with a block of fields",
    )


MODE_RULES = (_needed("model"), _needed("training"))


def _of_training(field: str, given: str, why: str) -> Rule:
    """Return the rule that a field belongs to training. `given` is CEL text of when it is present or switched on."""
    return Rule(
        id=f"serve-without-{field}",
        field=f".{field}",
        rule=f"!({_SERVES}) || !({given})",
        message=f"means nothing in mode serve: {why}; leave it out",
    )


def _switch(field: str, why: str) -> Rule:
    return _of_training(field, f"self.{field}", why)


def _option(field: str, why: str) -> Rule:
    return _of_training(field, f"has(self.{field})", why)


_NO_DATA = "a served model reads no corpus"
_ONE_BATCH = "all prompts go through the stages together"
_OF_TRAINING = (
    _option("training", "nothing is trained (serve.precision is the one thing to choose)"),
    _of_training("data.path", "self.data.path.size() > 0", _NO_DATA),
    _switch("data.mock", _NO_DATA),
    _option("data.split", _NO_DATA),
    _option("data.cachePath", _NO_DATA),
    _option("data.numWorkers", _NO_DATA),
    _switch("data.eodMaskLoss", _NO_DATA),
    _switch("data.resetPositionIds", _NO_DATA),
    _switch("data.resetAttentionMask", _NO_DATA),
    _switch("data.sft", _NO_DATA),
    _option("checkpoint.save", "weights do not change"),
    _switch("checkpoint.finetune", "only weights are read"),
    _switch("checkpoint.exitOnMissing", "without a checkpoint a served model always fails"),
    _option("parallelism.virtualPipeline", _ONE_BATCH),
    _switch("parallelism.sequenceParallel", "checkpoints that were trained with it are served without"),
    _switch("dpp.enabled", _ONE_BATCH),
    _switch("fbd.enabled", "there is no backward pass"),
    _switch("trace.enabled", "spans are those of training steps"),
    _option("runPolicy.progressDeadlineSeconds", "a served model makes no steps without requests"),
    _of_training("successPolicy", "self.successPolicy != 'AllWorkers'", "a served model never completes"),
)
SERVE_RULES = (
    Rule(
        id="serve-of-mode-serve",
        field=".serve",
        rule=f"!has(self.serve) || {_SERVES}",
        message="belongs to mode: serve; leave it out",
    ),
    Rule(
        id="scope-of-mode-serve",
        field=".scope",
        rule=f"!has(self.scope) || (({_SERVES} || has(self.scope.training)) && self.analyzer.enabled)",
        message="belongs to mode: serve with analyzer.enabled: true, and its block training to mode: train with "
        "analyzer.enabled: true; leave it out",
    ),
    Rule(
        id="scope-plugins-of-mode-serve",
        field=".scope.plugins",
        rule=f"!({_TRAINS}) || !has(self.scope) || self.scope.plugins.size() == 0",
        message="belongs to mode: serve, whose ranks import it; leave it out",
    ),
    Rule(
        id="scope-training-of-mode-train",
        field=".scope.training",
        rule=f"!({_SERVES}) || !has(self.scope) || !has(self.scope.training)",
        message="means nothing in mode serve: nothing is trained; leave it out",
    ),
    Rule(
        id="scope-training-enabled",
        field=".scope.training.enabled",
        rule="!has(self.scope) || !has(self.scope.training) || self.scope.training.enabled || "
        "!(self.scope.training.startPaused || has(self.scope.training.resumeAfterSeconds))",
        message="is false, so that startPaused and resumeAfterSeconds mean nothing; leave them out, or write true",
    ),
    Rule(
        id="probe-texts-after-captures",
        field=".scope.training.probeTexts",
        rule="!has(self.scope) || !has(self.scope.training) || self.scope.training.probeTexts.size() == 0 || "
        "self.scope.training.enabled || has(self.scope.training.captureEvery)",
        message="are run after captured steps, and no step is captured; write captureEvery, or leave them out",
        args=("--scope-probe-texts",),
    ),
    Rule(
        id="capture-not-finite-of-captures",
        field=".scope.training.captureNotFinite",
        rule="!has(self.scope) || !has(self.scope.training) || self.scope.training.captureNotFinite || "
        "self.scope.training.enabled || has(self.scope.training.captureEvery)",
        message="is false, and no step is captured; leave it out",
        args=("--no-scope-capture-not-finite",),
    ),
    Rule(
        id="scope-perturbations-of-mode-serve",
        field=".scope.perturbations",
        rule=f"!({_TRAINS}) || !has(self.scope) || self.scope.perturbations.size() == 0",
        message="belongs to mode: serve; perturb a training by megatronapp training JOB perturb",
    ),
    Rule(
        id="perturbations-named-once",
        field=".scope.perturbations",
        rule="!has(self.scope) || self.scope.perturbations.all(one, "
        "self.scope.perturbations.filter(other, other.name == one.name).size() == 1)",
        message="two recipes have one name; give each another name",
    ),
    Rule(
        id="one-active-perturbation",
        field=".scope.perturbations",
        rule="!has(self.scope) || self.scope.perturbations.filter(one, one.active).size() <= 1",
        message="several recipes are active; write active: true for one at most",
    ),
    Rule(
        id="serve-needs-a-checkpoint",
        field=".checkpoint.load",
        rule=f"!({_SERVES}) || has(self.checkpoint.load)",
        message="is missing; mode serve needs the directory of a checkpoint",
    ),
    *_OF_TRAINING,
    Rule(
        id="serve-of-gpt",
        field=".model.type",
        rule=f"!has(self.model) || self.model.type == 'gpt' || {_TRAINS}",
        message="bert generates no text; mode serve takes gpt alone",
    ),
    Rule(
        id="serve-one-replica",
        field=".parallelism.data",
        rule=f"!({_SERVES}) || {with_gang(f'{REPLICAS} == 1')}",
        message="a served model has one replica; write data: 1, and make a job for each further one",
        message_expression=cel_message_with_sizes(
            cel_message(
                f"{{{REPLICAS}}} replicas of the model, and a job serves one; write data: 1, "
                "and make a job for each further one"
            )
        ),
    ),
    Rule(
        id="serve-ranks-by-index",
        field=".network.rankOrder",
        rule=f"!({_SERVES}) || self.network.rankOrder == 'Index'",
        message="must be Index in mode serve: rank 0 answers, and the Service leads to worker 0; leave it out",
    ),
)
