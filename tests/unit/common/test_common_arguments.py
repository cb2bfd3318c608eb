"""A job's fields become the flags that the trainer takes."""

import pathlib
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from megatronapp_common.job import Serve, Spec, load_job, megatron_arguments, place_of
from megatronapp_common.job.api.scope import Scope
from megatronapp_common.job.arguments import FLAGS, OTHER_FLAGS, SERVE_FLAGS
from megatronapp_common.job.fields import model_of
from megatronapp_common.scope.perturbation.recipe import parse_recipe
from megatronapp_trainer.config import build_parser, parse
from megatronapp_trainer.serve.perturbation.named_recipes import read_perturbations
from megatronapp_trainer.serve.settings import build_serve_parser, read_command

EVERYTHING: dict[str, Any] = {
    "spec.parallelism": {
        "tensor": 2,
        "pipeline": 2,
        "virtualPipeline": 2,
        "firstStageLayers": 6,
        "lastStageLayers": 2,
        "sequenceParallel": True,
    },
    "spec.model": {
        "numLayers": 8,
        "hiddenSize": 64,
        "numAttentionHeads": 8,
        "seqLength": 32,
        "ffnHiddenSize": 96,
        "numQueryGroups": 2,
        "kvChannels": 16,
        "maxPositionEmbeddings": 64,
        "positionEmbeddingType": "rope",
        "rotaryBase": 5000,
        "rotaryPercent": 0.5,
        "normalization": "RMSNorm",
        "normEpsilon": 1e-6,
        "swiglu": True,
        "untieEmbeddingsAndOutputWeights": True,
        "disableBiasLinear": True,
        "addQkvBias": True,
        "attentionDropout": 0.0,
        "hiddenDropout": 0.25,
        "initMethodStd": 0.01,
        "transformerImpl": "local",
        "vocabSize": 1000,
        "makeVocabSizeDivisibleBy": 64,
    },
    "spec.training": {
        "microBatchSize": 1,
        "globalBatchSize": 8,
        "rampupBatchSize": [4, 4, 100],
        "trainIters": 100,
        "lr": 1e-3,
        "minLr": 1e-4,
        "lrDecayStyle": "WSD",
        "lrDecayIters": 90,
        "lrWarmupFraction": 0.1,
        "lrWsdDecayIters": 10,
        "lrWsdDecayStyle": "linear",
        "weightDecay": 0.1,
        "startWeightDecay": 0.0,
        "endWeightDecay": 0.1,
        "weightDecayIncrStyle": "linear",
        "clipGrad": 0.5,
        "adamBeta1": 0.8,
        "adamBeta2": 0.95,
        "adamEps": 1e-6,
        "precision": "bf16",
        "seed": 7,
        "useDistributedOptimizer": True,
        "overlapGradReduce": True,
        "overlapParamGather": True,
        "recompute": {"granularity": "full", "method": "uniform", "numLayers": 1},
        "calculatePerTokenLoss": True,
        "logInterval": 5,
        "evalInterval": 20,
        "evalIters": 2,
        "exitInterval": 50,
        "exitDurationMinutes": 30.0,
        "tensorboardDir": "tb",
        "manualGc": True,
        "manualGcInterval": 10,
        "deterministic": True,
        "distributedTimeoutMinutes": 3.0,
    },
    "spec.data": {
        "path": ["0.3", "a", "0.7", "b"],
        "split": "98,1,1",
        "cachePath": "cache",
        "tokenizer": "tokenizer.json",
        "eodMaskLoss": True,
        "resetAttentionMask": True,
        "numWorkers": 1,
    },
    "spec.checkpoint": {
        "save": "out",
        "load": "in",
        "saveInterval": 10,
        "asyncSave": True,
        "memorySaveInterval": 5,
        "keep": 3,
        "finetune": True,
        "exitOnMissing": True,
    },
    "spec.dpp": {
        "enabled": True,
        "schedule": "auto",
        "placement": "loop",
        "memoryCap": 5,
        "chunks": 2,
        "transport": "native",
        "workload": 3,
    },
    "spec.trace": {
        "enabled": True,
        "capacity": 4096,
        "interval": 100,
        "continuousIterations": 2,
        "granularity": "base",
    },
    "spec.analyzer": {"enabled": True},
    "spec.runPolicy": {"restart": "InPlace"},
    "spec.scope": {
        "training": {
            "startPaused": True,
            "resumeAfterSeconds": 60,
            "captureEvery": 50,
            "captureNotFinite": False,
            "probeTexts": ["a b"],
        }
    },
    "spec.faults": [{"rank": 1, "kind": "link", "factor": 2.0, "fromStep": 10, "steps": 5, "peer": 0}],
    "spec.args": ["--seed", "9"],
}


def test_demo_flags(repository: pathlib.Path) -> None:
    arguments = megatron_arguments(load_job((repository / "examples/demo.yaml").read_text(encoding="utf-8")))
    line = " ".join(arguments)
    for part in (
        "--pipeline-model-parallel-size 2",
        "--data-path .demo/corpus_text_document",
        "--tokenizer-file .demo/tokenizer.json",
        "--split 98,2,0",
        "--lr 0.002",
        "--use-distributed-optimizer",
    ):
        assert f" {part} " in line
    assert "--bf16" not in arguments
    assert "--swiglu" not in arguments


@pytest.mark.parametrize("changes", [{}, EVERYTHING], ids=["small", "everything"])
def test_the_trainer_takes_every_flag(build: Any, changes: dict[str, Any]) -> None:
    parse(megatron_arguments(load_job(build(changes))))


@pytest.mark.parametrize(("nodes", "copies"), [(1, False), (2, True)])
def test_states_in_memory_have_copies_where_there_is_another_worker(build: Any, nodes: int, copies: bool) -> None:
    checkpoint = {"save": "out", "memorySaveInterval": 5}
    world = {"spec.nodes": nodes, "spec.procPerNode": 2, "spec.parallelism": {}, "spec.runPolicy.restart": "InPlace"}
    arguments = megatron_arguments(load_job(build({"spec.checkpoint": checkpoint, **world})))
    assert arguments[arguments.index("--non-persistent-save-interval") + 1] == "5"
    assert ("--replication" in arguments) is copies
    assert parse(arguments).checkpoint.replication is copies


@pytest.mark.parametrize("flags", [["--train-samples", "801"], ["--train-samples=801"]])
def test_a_length_in_samples_takes_the_place_of_the_steps(build: Any, flags: list[str]) -> None:
    job = load_job(build({"spec.args": flags}))
    assert "--train-iters" not in megatron_arguments(job)
    config = parse(megatron_arguments(job))
    assert config.training.train_iters == 801 // (config.training.global_batch_size or 1)


def test_values_arrive_in_the_trainer(build: Any) -> None:
    config = parse(megatron_arguments(load_job(build(EVERYTHING))))
    assert config.model.group_query_attention
    assert config.model.num_query_groups == 2
    assert config.model.attention_dropout == 0.0
    assert config.parallel.num_virtual_stages_per_pipeline_rank == 2
    assert config.precision.bf16
    assert config.precision.recompute_granularity == "full"
    assert config.training.rampup_batch_size == (4, 4, 100)
    assert config.training.seed == 9  # spec.args are last
    assert config.optimizer.adam_eps == 1e-6
    assert config.data.data_path == ("0.3", "a", "0.7", "b")
    assert (config.checkpoint.keep_last, config.checkpoint.async_save) == (3, True)
    assert (config.checkpoint.non_persistent_save_interval, config.checkpoint.replication) == (5, True)
    assert (config.dpp.use_dpp, config.dpp.dpp_schedule, config.dpp.memory_cap_microbatches) == (True, "auto", 5)
    assert (config.dpp.transport, config.dpp.threads) == ("native", 3)
    assert config.logging.faults == '[{"rank":1,"kind":"link","factor":2.0,"fromStep":10,"steps":5,"peer":0}]'


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"spec.dpp": {"enabled": True, "chunks": 2}}, "spec.dpp.chunks"),
        ({"spec.parallelism": {"pipeline": 2, "virtualPipeline": 2}}, "spec.parallelism.virtualPipeline"),
        ({}, "spec.parallelism.virtualPipeline"),
    ],
)
def test_chunks_have_a_single_flag_whose_place_is_the_field_that_was_written(
    build: Any, changes: dict[str, Any], place: str
) -> None:
    job = load_job(build({"spec.parallelism": {"pipeline": 2}, **changes}))
    flag = "--num-virtual-stages-per-pipeline-rank"
    assert megatron_arguments(job).count(flag) == bool(changes)
    assert place_of(job, flag) == place


OF_FBD = {
    "--forward-backward-disaggregating",
    "--fbd-backward-per-forward",
    "--ignore-forward-tensor-parallel",
    "--fbd-ship",
}
"""Flags of MegaFBD, which excludes MegaDPP."""
APART = "--fbd-forward-ranks-apart"
ON_CPU = "--fbd-forward-on-cpu"


@pytest.mark.parametrize(
    ("fbd", "flags"),
    [
        ({}, []),
        ({"backwardPerForward": 1}, []),
        ({"backwardPerForward": 2}, ["--fbd-backward-per-forward", "2"]),
        ({"ignoreForwardTensorParallel": True}, ["--ignore-forward-tensor-parallel"]),
        ({"ship": "saved"}, ["--fbd-ship", "saved"]),
        ({"forward": {}}, [APART]),
    ],
)
def test_fields_of_fbd_are_flags_of_the_trainer(build: Any, fbd: dict[str, Any], flags: list[str]) -> None:
    sizes = {"spec.nodes": 1, "spec.procPerNode": 24, "spec.parallelism": {"tensor": 2, "pipeline": 2}}
    changes = {"spec.fbd": {"enabled": True, **fbd}, "spec.model.attentionDropout": 0.0}
    job = load_job(build(sizes | changes | {"spec.training.globalBatchSize": None}))
    arguments = megatron_arguments(job)
    given = [argument for argument in arguments if argument in {*OF_FBD, APART}]
    assert given == ["--forward-backward-disaggregating", *flags[:1]]
    assert not flags or arguments[arguments.index(flags[0]) :][: len(flags)] == flags
    assert parse(arguments).fbd_world(job.world.world_size) == job.world.fbd


def test_the_place_of_separate_forward_ranks_is_their_workers(build: Any) -> None:
    changes = {"spec.nodes": 1, "spec.procPerNode": 2, "spec.parallelism": {}, "spec.training.globalBatchSize": None}
    job = load_job(build(changes | {"spec.fbd": {"enabled": True, "forward": {}}}))
    assert place_of(job, APART) == "spec.fbd.forward"
    assert place_of(job, "--fbd-backward-per-forward") == "spec.fbd.backwardPerForward"


def test_forward_workers_without_gpus_give_a_flag_if_backward_workers_have_some(build: Any) -> None:
    changes = {"spec.nodes": 1, "spec.procPerNode": 2, "spec.parallelism": {}, "spec.training.globalBatchSize": None}
    changes |= {"spec.model.attentionDropout": 0.0, "spec.model.hiddenDropout": 0.0}
    found = []
    for gpus, forward_gpus in ((0, 0), (2, 0), (2, 2)):
        fbd = {"enabled": True, "ship": "full", "forward": {"gpusPerNode": forward_gpus}}
        job = load_job(build(changes | {"spec.gpusPerNode": gpus, "spec.fbd": fbd}))
        assert parse(megatron_arguments(job)).fbd.fbd_forward_on_cpu == (ON_CPU in megatron_arguments(job))
        found.append(ON_CPU in megatron_arguments(job))
    assert found == [False, True, False]
    assert place_of(job, ON_CPU) == "spec.fbd.forward.gpusPerNode"


def test_everything_gives_every_flag_of_the_table(build: Any) -> None:
    arguments = set(megatron_arguments(load_job(build(EVERYTHING))))
    without = {"--mock-data", "--vocab-file", "--merge-file", "--lr-warmup-iters", "--reset-position-ids"}
    without |= {"--trace-dir"}  # not with virtual pipeline stages
    without |= {"--model-type", "--tokenizer-type"}  # of BERT
    without |= {"--sft"}  # not with weights of a blend
    missing = {entry.flag for entry in FLAGS} - arguments
    assert missing == without | OF_FBD


def test_the_table_knows_the_trainers_flags_only() -> None:
    known = {flag for action in build_parser()._actions for flag in action.option_strings}
    assert {entry.flag for entry in FLAGS} <= known


def test_every_field_of_the_training_has_a_flag() -> None:
    described = {entry.field for entry in FLAGS} | {"model.type", "parallelism.data", "training.precision"}
    blocks = {"model", "training", "parallelism", "data", "checkpoint", "trace", "dpp", "fbd"}
    described = {field for field in described if not field.startswith("scope.training.")}
    fields = {path for name in blocks for path in leaves(model_of(Spec.model_fields[name].annotation), name)}
    of_pods = {path for path in fields if ".volume." in path or path.startswith("fbd.forward.")}
    assert fields - of_pods == described


SERVED: dict[str, Any] = {
    "spec.mode": "serve",
    "spec.nodes": 1,
    "spec.parallelism": {"tensor": 2, "pipeline": 2, "data": 1},
    "spec.procPerNode": 4,
    "spec.model": ...,
    "spec.training": ...,
    "spec.data": {"tokenizer": "tokenizer.json"},
    "spec.checkpoint": {"load": "in"},
    "spec.trace": ...,
    "spec.serve": {
        "host": "127.0.0.9",
        "port": 0,
        "maxBatch": 3,
        "maxTokens": 5,
        "maxLength": 64,
        "queueLength": 7,
        "prefillChunk": 16,
        "precision": "bf16",
    },
    "spec.args": ["--transformer-impl", "local"],
}


def test_a_served_job_gives_the_servers_flags(build: Any) -> None:
    job = load_job(build(SERVED))
    command = read_command(megatron_arguments(job))
    assert job.spec.serve is not None
    assert (command.options.host, command.options.port) == ("127.0.0.9", 0)
    assert (command.options.max_batch_size, command.options.max_tokens, command.options.max_length) == (3, 5, 64)
    assert (command.options.queue_length, command.options.prefill_chunk, command.options.precision) == (7, 16, "bf16")
    assert str(command.load) == "in"
    assert command.rest[-2:] == ("--transformer-impl", "local")
    assert place_of(job, "--max-length") == "spec.serve.maxLength"


def test_every_field_of_serve_has_a_flag_that_the_server_knows() -> None:
    fields = {field for field in leaves(Scope, "scope") if "perturbations" not in field}
    fields -= set(OTHER_FLAGS.values())
    assert {entry.field for entry in SERVE_FLAGS} == leaves(Serve, "serve") | {"scope.plugins"}
    assert fields <= {entry.field for entry in (*FLAGS, *SERVE_FLAGS)}
    known = {flag for action in build_serve_parser()._actions for flag in action.option_strings}
    assert {entry.flag for entry in SERVE_FLAGS} | {"--scope-perturbations"} <= known


def test_recipes_of_the_manifest_are_a_flag_that_the_server_reads(build: Any) -> None:
    action = {"type": "gaussian", "coefficient": 0.1}
    recipe = {"seed": 3, "perturbations": [{"kind": "system", "action": action, "layers": [0]}]}
    given = {"spec.scope": {"perturbations": [{"name": "shift", "active": True, "recipe": recipe}]}}
    job = load_job(build(SERVED | given | {"spec.analyzer.enabled": True}))
    arguments = megatron_arguments(job)
    served = read_perturbations(arguments[arguments.index("--scope-perturbations") + 1])
    assert served.active == parse_recipe(recipe)
    assert place_of(job, "--scope-perturbations") == "spec.scope.perturbations"


def leaves(model: type[BaseModel] | None, prefix: str) -> set[str]:
    assert model is not None
    found: set[str] = set()
    for name, field in model.model_fields.items():
        nested = model_of(field.annotation)
        found |= leaves(nested, f"{prefix}.{name}") if nested else {f"{prefix}.{name}"}
    return found


def test_arguments_are_text_that_yaml_keeps(build: Any) -> None:
    arguments = megatron_arguments(load_job(build(EVERYTHING)))
    assert yaml.safe_load(yaml.safe_dump(arguments)) == arguments


@pytest.mark.parametrize(
    ("flag", "value", "place"),
    [
        ("--seed", None, "spec.args[0]"),
        ("--lr", None, "spec.training.lr"),
        ("--data-path", "b", "spec.data.path[3]"),
        ("--data-path", "c", "spec.data.path"),
        ("--recompute-num-layers", None, "spec.training.recompute.numLayers"),
        ("--vocab-file", None, "spec.data.vocabFile"),
        ("--bf16", None, "spec.training.precision"),
        ("--faults", None, "spec.faults"),
        ("--fp16", None, "spec.training.precision"),
    ],
)
def test_a_flag_is_found_in_the_manifest(build: Any, flag: str, value: str | None, place: str | None) -> None:
    assert place_of(load_job(build(EVERYTHING)), flag, value) == place


def test_the_last_of_equal_flags_counts(build: Any) -> None:
    job = load_job(build({"spec.args": ["--seed", "1", "--seed=2"]}))
    assert place_of(job, "--seed") == "spec.args[2]"


def test_bert_gives_its_type_and_tokenizer(build: Any) -> None:
    bert = {
        "spec.model.type": "bert",
        "spec.data.tokenizerType": "BertWordPieceLowerCase",
        "spec.data.vocabFile": "vocab.txt",
    }
    arguments = megatron_arguments(load_job(build(bert)))
    for flag, value in (("--model-type", "bert"), ("--tokenizer-type", "BertWordPieceLowerCase")):
        assert arguments[arguments.index(flag) + 1] == value


def test_the_place_of_a_flag_in_another_spelling_is_its_item(build: Any) -> None:
    job = load_job(build({"spec.args": ["--tokenizer-model", "data/tokenizer.json"]}))
    assert place_of(job, "--tokenizer-file") == "spec.args[0]"
    assert place_of(load_job(build({})), "--tokenizer-file") == "spec.data.tokenizer"
