"""The rules refuse what the trainer would refuse once its pods have their GPUs, and nothing that it accepts."""

import json
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from pytest_workers import examples
from rule_examples import ADMISSION_EXAMPLES, EXAMPLES, Example, changed, manifest

from megatronapp_common.errors import JobError
from megatronapp_common.job import MegatronJob, judge, megatron_arguments
from megatronapp_common.job.rules import ADMITTED_RULES
from megatronapp_common.names import ExitCode
from megatronapp_trainer.training import check

OF_TRAINER = {
    "batch-of-interleaved-stages",
    "context-unsupported",
    "context-without-attention-dropout",
    "sequence-of-context",
    "windows-of-roles",
    "directory-of-plain-pipeline",
    "ramp-of-replicas",
    "ramp-reaches-goal",
    "forward-on-cpu",
    "weight-decay-growth",
    "weight-decay-constant",
    "wsd-needs-last-phase",
    *(rule.id for rule in ADMITTED_RULES),
}
"""Rules whose refusals the trainer repeats."""
BEYOND_FLAGS = "probeTexts"
"""A field that the trainer's check of the flags does not judge: ranks read its texts once they have started."""


def refusals(job: MegatronJob) -> list[str]:
    """Return why the trainer refuses the flags of a job; its files are absent, which is another matter."""
    found = check.find_problems(megatron_arguments(job), job.world.world_size)
    return [problem.message for problem in found if problem.code == ExitCode.USAGE]


def read(document: dict[str, Any]) -> tuple[MegatronJob, set[str]]:
    """Return the job by its types, and the rules that it breaks."""
    job = MegatronJob.model_validate_json(json.dumps(document), by_alias=True, by_name=False)
    return job, {rule.id for rule, _ in judge.broken_rules(job.spec.to_dict())}


TRAINED = [
    example
    for example in (*EXAMPLES, *ADMISSION_EXAMPLES)
    if example.rule_id in OF_TRAINER and "spec.mode" not in example.change and BEYOND_FLAGS not in str(example.change)
]


@pytest.mark.parametrize("example", [pytest.param(e, id=f"{e.rule_id}-{'good' if e.good else 'bad'}") for e in TRAINED])
def test_the_trainer_judges_the_examples_as_the_rules_do(example: Example) -> None:
    job, broken = read(manifest(example))
    assert broken == (set() if example.good else {example.rule_id})
    assert bool(refusals(job)) != example.good, refusals(job)


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


sizes = st.sampled_from([1, 2, 4])
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "parallelism.tensor": sizes,
    "parallelism.pipeline": sizes,
    "parallelism.context": sizes,
    "parallelism.data": sizes,
    "parallelism.expert": st.sampled_from([1, 1, 2]),
    "parallelism.virtualPipeline": maybe(st.just(2)),
    "parallelism.sequenceParallel": st.booleans(),
    "model.seqLength": st.sampled_from([16, 24, 32]),
    "model.attentionDropout": maybe(st.sampled_from([0.0, 0.1])),
    "model.hiddenDropout": maybe(st.just(0.0)),
    "training.globalBatchSize": maybe(st.sampled_from([8, 16, 32])),
    "training.rampupBatchSize": maybe(st.tuples(st.sampled_from([4, 8]), st.sampled_from([2, 4, 8]), st.just(64))),
    "training.lrDecayStyle": maybe(st.sampled_from(["WSD", "cosine"])),
    "training.lrDecayIters": maybe(st.sampled_from([5, 50])),
    "training.lrWsdDecayIters": maybe(st.sampled_from([5, 50, 500])),
    "training.weightDecayIncrStyle": maybe(st.sampled_from(["constant", "linear", "cosine"])),
    "training.startWeightDecay": maybe(st.sampled_from([0.0, 0.1])),
    "training.endWeightDecay": maybe(st.sampled_from([0.0, 0.1])),
    "training.recompute": maybe(
        st.fixed_dictionaries(
            {"granularity": st.just("full"), "method": st.sampled_from(["block", "uniform"]), "numLayers": st.just(1)}
        )
    ),
    "data.path": st.sampled_from([[], ["a"], ["a", "b"], ["0.3", "a", "0.7", "b"], ["0", "a", "1", "b"]]),
    "data.mock": st.booleans(),
    "data.split": maybe(st.sampled_from(["9,1,0", "0,0,0", "1.2.3", "1, .5", ".", "2.,1.0"])),
    "data.tokenizer": maybe(st.just("tokenizer.json")),
    "data.eodMaskLoss": st.booleans(),
    "data.resetPositionIds": st.booleans(),
    "data.resetAttentionMask": st.booleans(),
    "data.sft": st.booleans(),
    "trace.interval": maybe(st.just(5)),
    "trace.continuousIterations": maybe(st.just(2)),
    "trace.granularity": maybe(st.sampled_from(["base", "full"])),
    "trace.directory": maybe(st.just("spans")),
    "dpp": maybe(st.fixed_dictionaries({"enabled": st.just(True)}, optional={"chunks": st.sampled_from([1, 2])})),
    "fbd": maybe(
        st.fixed_dictionaries(
            {"enabled": st.just(True)},
            optional={
                "ship": st.sampled_from(["saved", "full", "auto"]),
                "forward": st.fixed_dictionaries({"gpusPerNode": st.sampled_from([0, 64])}),
            },
        )
    ),
    "gpusPerNode": st.sampled_from([0, 64]),
}
SUBJECTS: dict[str, str] = {
    "experts": "parallelism.data parallelism.expert",
    "sequences": "parallelism.tensor parallelism.context parallelism.sequenceParallel model.seqLength "
    "model.attentionDropout",
    "batches": "parallelism.pipeline parallelism.data parallelism.virtualPipeline training.globalBatchSize "
    "training.rampupBatchSize",
    "decay": "training.lrDecayStyle training.lrDecayIters training.lrWsdDecayIters",
    "weights": "training.weightDecayIncrStyle training.startWeightDecay training.endWeightDecay",
    "corpus": "data.path data.mock data.split data.sft",
    "documents": "data.tokenizer data.eodMaskLoss data.resetPositionIds data.resetAttentionMask data.sft",
    "windows": "fbd trace.interval trace.continuousIterations trace.granularity",
    "directory": "fbd dpp parallelism.pipeline parallelism.virtualPipeline trace.directory",
    "forward": "fbd gpusPerNode training.recompute",
    "dropout": "parallelism.context fbd model.attentionDropout model.hiddenDropout",
}
"""Fields that rules read together."""
ARGS: tuple[list[str], ...] = (
    ["--num-experts", "4"],
    ["--cp-comm-type", "a2a"],
    ["--attention-dropout", "0"],
    ["--trace-granularity=base"],
    ["--num-virtual-stages-per-pipeline-rank", "1"],
    ["--rampup-batch-size", "8", "8", "64"],
    ["--end-weight-decay", "0.2"],
    ["--lr-wsd-decay-iters=5"],
    ["--tokenizer-model", "tokenizer.json"],
    ["--data-path", "a"],
    ["--split", "9,1"],
    ["--recompute-method", "uniform"],
    ["--fbd-ship=full"],
)
PLAIN: dict[str, Any] = {
    "spec.nodes": None,
    "spec.procPerNode": None,
    "spec.parallelism": {"data": 1},
    "spec.model.numLayers": 8,
    "spec.model.numAttentionHeads": 16,
    "spec.model.vocabSize": 64,
    "spec.model.disableBiasLinear": True,
    "spec.model.attentionDropout": 0,
    "spec.model.hiddenDropout": 0,
    "spec.training.globalBatchSize": 32,
}
"""A job of a single rank, in which a field of FIELDS may have any of its values."""


@settings(max_examples=examples(1000))
@given(fields=st.data())
def test_the_trainer_refuses_no_job_that_the_rules_accept_and_the_other_way_round(fields: st.DataObject) -> None:
    subjects = fields.draw(st.lists(st.sampled_from(sorted(SUBJECTS)), min_size=1, max_size=2, unique=True))
    names = sorted({name for subject in subjects for name in SUBJECTS[subject].split()})
    args = fields.draw(st.just([]) | st.sampled_from(ARGS))
    changes = {f"spec.{name}": fields.draw(FIELDS[name], label=name) for name in names}
    job, broken = read(changed(PLAIN | changes | {"spec.args": args}))
    try:
        found = refusals(job)
    except JobError:  # without whole replicas there is nothing to start
        assert broken
        return
    event("refused" if broken else "accepted")
    if not broken and not args:
        assert found == []
    if broken & OF_TRAINER:
        assert found, broken
