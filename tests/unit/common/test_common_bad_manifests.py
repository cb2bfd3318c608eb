"""Every bad manifest gives one clear line: where, what is wrong, what to write."""

from typing import Any

import pytest

from megatronapp_common.errors import JobError
from megatronapp_common.job import load_job

FAULT = {"rank": 1, "kind": "compute", "factor": 3, "fromStep": 10, "steps": 5}
LONG = "x" * 51

# (changes to a manifest that is right, the line that must be said)
ROWS: list[tuple[dict[str, Any], str]] = [
    # Fields by themselves
    ({"kind": ...}, "kind: is missing; write kind: MegatronJob"),
    ({"kind": "MegatronJobs"}, "kind: 'MegatronJobs' is not possible; write MegatronJob"),
    (
        {"kind": "ClusterMegatronProfile"},
        "kind: ClusterMegatronProfile is a profile; check it with a job: megatronapp validate JOB.yaml --profile FILE",
    ),
    (
        {"apiVersion": "megatronapp.io/v1"},
        "apiVersion: 'megatronapp.io/v1' is not possible; write megatronapp.io/v1alpha1",
    ),
    ({"metadata.name": ...}, "metadata.name: is missing; write name with text"),
    ({"metadata.name": LONG}, f"metadata.name: '{LONG}' is too long; write at most 50 characters"),
    (
        {"metadata.name": "My_Job"},
        "metadata.name: 'My_Job' is not allowed; "
        "write lower-case letters, digits and '-', a letter first and a letter or digit last",
    ),
    (
        {"metadata.name": "7b"},
        "metadata.name: '7b' is not allowed; "
        "write lower-case letters, digits and '-', a letter first and a letter or digit last",
    ),
    ({"metadata.name": ""}, "metadata.name: '' is empty; write at least one character"),
    ({"metadata.lables": {}}, "metadata.lables: unknown field; did you mean labels?"),
    ({"spec.model.numLayer": 4}, "spec.model.numLayer: unknown field; did you mean numLayers?"),
    ({"spec.model.num_layers": 4}, "spec.model.num_layers: unknown field; did you mean numLayers?"),
    ({"spec.training.learningRate": 1.0}, "spec.training.learningRate: unknown field; known here: "),
    ({"spec.lr": 1.0}, "spec.lr: unknown field here; it belongs at spec.training.lr"),
    (
        {"spec.env": [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "key"}}}]},
        "spec.env[0].valueFrom: unknown field; write a variable from a Secret or ConfigMap under podTemplate.spec."
        "containers, in the env of the container trainer",
    ),
    ({"spec.paralelism": {}}, "spec.paralelism: unknown field; did you mean parallelism?"),
    ({"spec.model": ...}, "spec.model: is missing; write model with a block of fields"),
    ({"spec.model": 4}, "spec.model: 4 is not a block of fields; write a block of fields"),
    ({"spec.model.seqLength": ...}, "spec.model.seqLength: is missing; write seqLength with a whole number"),
    ({"spec.nodes": "2"}, "spec.nodes: '2' is not a whole number; write it without quotes: 2"),
    ({"spec.nodes": 0}, "spec.nodes: 0 is too small; write 1 or more"),
    ({"spec.nodes": 5000}, "spec.nodes: 5000 is too large; write 4096 or less"),
    ({"spec.nodes": 2.0}, "spec.nodes: 2.0 is not a whole number; write 2"),
    ({"spec.nodes": 2.5}, "spec.nodes: 2.5 is not a whole number; write a whole number"),
    ({"spec.nodes": True}, "spec.nodes: true is not a whole number; write a whole number"),
    ({"spec.suspend": "yes"}, "spec.suspend: 'yes' is not true or false; write true or false"),
    ({"spec.suspend": None}, "spec.suspend: an empty value is not true or false; write one, or leave the field out"),
    ({"spec.training.lr": 0}, "spec.training.lr: 0 is too small; write more than 0"),
    ({"spec.training.lr": "fast"}, "spec.training.lr: 'fast' is not a number; write a number"),
    ({"spec.training.lr": float("nan")}, "spec.training.lr: nan is not finite; write a number"),
    (
        {"spec.training.lrDecayStyle": "cosin"},
        "spec.training.lrDecayStyle: 'cosin' is not possible; "
        "write constant or linear or cosine or inverse-square-root or WSD; did you mean cosine?",
    ),
    ({"spec.training.precision": "fp8"}, "spec.training.precision: 'fp8' is not possible; write fp32 or bf16 or fp16"),
    ({"spec.training.rampupBatchSize": [8, 8]}, "spec.training.rampupBatchSize: a list has 2 items; write 3"),
    ({"spec.data.path": "corpus"}, "spec.data.path: 'corpus' is not a list of texts; write [corpus]"),
    (
        {"spec.data.path": "0.3 a 0.7 b"},
        "spec.data.path: '0.3 a 0.7 b' is not a list of texts; write ['0.3', a, '0.7', b]",
    ),
    (
        {"spec.args": "--lr-decay-samples 9 --sft"},
        "spec.args: '--lr-decay-samples 9 --sft' is not a list of texts; write [--lr-decay-samples, '9', --sft]",
    ),
    (
        {"spec.training.rampupBatchSize": "8 8 64"},
        "spec.training.rampupBatchSize: '8 8 64' is not a list of whole numbers; write [8, 8, 64]",
    ),
    (
        {"spec.training.recompute": "selective"},
        "spec.training.recompute: 'selective' is not a block of fields; write a block of fields: granularity, method, "
        "numLayers",
    ),
    ({"spec.data.path": [0.3, "a"]}, 'spec.data.path[0]: 0.3 is not text; write it in quotes: "0.3"'),
    (
        {"spec.data.split": "a,b"},
        "spec.data.split: 'a,b' is not allowed; write up to three numbers with commas between, such as 98,2,0",
    ),
    ({"spec.args": ["--seed", 7]}, 'spec.args[1]: 7 is not text; write it in quotes: "7"'),
    ({"spec.faults": [{**FAULT, "factor": 1}]}, "spec.faults[0].factor: 1 is too small; write more than 1"),
    (
        {"spec.faults": [{**FAULT, "kind": "gpu"}]},
        "spec.faults[0].kind: 'gpu' is not possible; write compute or host or link",
    ),
    ({"spec.faults": [{**FAULT, "fromStp": 1}]}, "spec.faults[0].fromStp: unknown field; did you mean fromStep?"),
    (
        {"spec.env": [{"name": "A-B"}]},
        "spec.env[0].name: 'A-B' is not allowed; write letters, digits and '_', no digit first",
    ),
    ({"spec.runPolicy": {"maxRestarts": -1}}, "spec.runPolicy.maxRestarts: -1 is too small; write 0 or more"),
    ({"spec.analyzer": {"port": 70000}}, "spec.analyzer.port: 70000 is too large; write 65535 or less"),
    ({"spec.mode": "serving"}, "spec.mode: 'serving' is not possible; write train or serve"),
    # World
    (
        {"spec.procPerNode": 3},
        "spec.parallelism: 6 ranks (2 nodes x 3) cannot be divided into replicas of 4 ranks (tensor 2 x pipeline 2); "
        "make nodes x procPerNode a multiple of 4",
    ),
    (
        {"spec.parallelism.data": 3},
        "spec.parallelism.data: 3 replicas of 4 ranks (tensor 2 x pipeline 2) are 12 ranks, but 2 nodes x 4 are 8; "
        "write data: 2, or leave data out",
    ),
    (
        {"spec.parallelism.data": 3, "spec.procPerNode": ..., "spec.nodes": 5},
        "spec.parallelism.data: 3 replicas of 4 ranks (tensor 2 x pipeline 2) are 12 ranks, but 5 nodes x 2 are 10; "
        "make nodes x procPerNode equal to 12",
    ),
    (
        {"spec.nodes": 3, "spec.procPerNode": ...},
        "spec.procPerNode: is missing and 4 ranks (tensor 2 x pipeline 2) cannot be spread over 3 nodes; "
        "write procPerNode, or change nodes to a divisor of 4",
    ),
    (
        {"spec.gpusPerNode": 2},
        "spec.procPerNode: 4 ranks but gpusPerNode 2; each rank needs its own GPU: write 2 or less, "
        "or gpusPerNode: 0 to train on the CPU",
    ),
    (
        {"spec.gpusPerNode": 2, "spec.procPerNode": ..., "spec.parallelism.data": 2},
        "spec.nodes: 2 nodes of 2 GPUs cannot hold 8 ranks; write nodes: 4",
    ),
    (
        {"spec.nodes": ..., "spec.procPerNode": ..., "spec.parallelism.data": 50},
        "spec.nodes: 200 ranks on 1 nodes are 200 on each, at most 64 are possible; write nodes: 4 or more",
    ),
    (
        {"spec.nodes": ..., "spec.procPerNode": 1, "spec.parallelism.data": 500_000_000},
        "spec.parallelism: needs 2000000000 nodes of 1 ranks; at most 4096 are possible",
    ),
    # Model
    (
        {"spec.model.type": "bert"},
        "spec.data.tokenizerType: with model.type bert write tokenizerType and vocabFile, without mergeFile "
        "(or data.mock: true); with gpt leave tokenizerType out",
    ),
    (
        {"spec.parallelism.expert": 2, "spec.dpp.enabled": True},
        "spec.parallelism.expert: must be 1 with fbd and dpp; write 1",
    ),
    (
        {"spec.model.numLayers": 5},
        "spec.model.numLayers: 5 cannot be divided into 2 stages; write 6",
    ),
    (
        {"spec.model.numLayers": 6, "spec.parallelism.virtualPipeline": 2},
        "spec.model.numLayers: 6 cannot be divided into 2 stages of 2 chunks; write 8",
    ),
    (
        {"spec.parallelism.virtualPipeline": 1},
        "spec.parallelism.virtualPipeline: 1 is the plain schedule; leave it out, or write 2 or more",
    ),
    (
        {"spec.parallelism.virtualPipeline": 2, "spec.parallelism.pipeline": 1, "spec.parallelism.tensor": 4},
        "spec.parallelism.virtualPipeline: 2 needs pipeline above 1; leave it out",
    ),
    (
        {"spec.model.hiddenSize": 66},
        "spec.model.hiddenSize: 66 is not a multiple of numAttentionHeads 4; write 68, or give kvChannels",
    ),
    (
        {"spec.model.numAttentionHeads": 1},
        "spec.model.numAttentionHeads: 1 is not a multiple of parallelism.tensor 2; write 2",
    ),
    (
        {"spec.model.numQueryGroups": 6, "spec.model.numAttentionHeads": 8},
        "spec.model.numQueryGroups: 6 does not divide numAttentionHeads 8; write a divisor of it",
    ),
    (
        {"spec.model.numQueryGroups": 3, "spec.model.numAttentionHeads": 12, "spec.model.hiddenSize": 96},
        "spec.model.numQueryGroups: 3 is neither a multiple nor a divisor of parallelism.tensor 2; write 4",
    ),
    (
        {"spec.model.ffnHiddenSize": 127},
        "spec.model.ffnHiddenSize: 127 is not a multiple of parallelism.tensor 2; write 128",
    ),
    (
        {"spec.model.maxPositionEmbeddings": 16},
        "spec.model.maxPositionEmbeddings: 16 is below seqLength 32; write 32 or more",
    ),
    (
        {"spec.parallelism.sequenceParallel": True, "spec.parallelism.tensor": 1},
        "spec.parallelism.sequenceParallel: needs tensor above 1; leave it out",
    ),
    (
        {"spec.parallelism.sequenceParallel": True, "spec.model.seqLength": 31},
        "spec.model.seqLength: 31 is not a multiple of parallelism.tensor 2, which sequenceParallel needs; write 32",
    ),
    # Training
    (
        {"spec.training.globalBatchSize": 7},
        "spec.training.globalBatchSize: 7 is not a multiple of microBatchSize 1 x 2 replicas; write 8",
    ),
    (
        {"spec.training.globalBatchSize": 6, "spec.parallelism.virtualPipeline": 2},
        "spec.training.globalBatchSize: 6 gives 3 microbatches, and the interleaved schedule needs a multiple of "
        "pipeline 2; write 8",
    ),
    (
        {"spec.training.rampupBatchSize": [6, 4, 100]},
        "spec.training.rampupBatchSize: 6 does not reach globalBatchSize 8 in steps of 4",
    ),
    (
        {"spec.training.rampupBatchSize": [3, 5, 100]},
        "spec.training.rampupBatchSize: start 3 and increment 5 must be multiples of 2 (microBatchSize x data); "
        "write [4, 6, ...]",
    ),
    (
        {"spec.training.rampupBatchSize": [2, 2, 100], "spec.training.globalBatchSize": ...},
        "spec.training.globalBatchSize: is missing; rampupBatchSize needs it as its goal",
    ),
    (
        {"spec.training.minLr": 0.01},
        "spec.training.minLr: 0.01 is above lr 0.001; write 0.001 or less",
    ),
    (
        {"spec.training.lrWarmupIters": 100},
        "spec.training.lrWarmupIters: 100 must be below the 100 steps of the decay; write 10",
    ),
    (
        {"spec.training.lrWarmupIters": 5, "spec.training.lrWarmupFraction": 0.1},
        "spec.training.lrWarmupFraction: lrWarmupIters is given too; leave one of them out",
    ),
    (
        {"spec.training.lrDecayStyle": "WSD"},
        "spec.training.lrWsdDecayIters: is missing; lrDecayStyle WSD needs the steps of its last phase",
    ),
    (
        {"spec.training.weightDecayIncrStyle": "linear"},
        "spec.training.weightDecayIncrStyle: linear needs startWeightDecay and endWeightDecay; write both",
    ),
    (
        {"spec.training.startWeightDecay": 0.1},
        "spec.training.weightDecayIncrStyle: startWeightDecay and endWeightDecay belong to linear or cosine; "
        "write one of these, or leave them out",
    ),
    (
        {"spec.training.overlapParamGather": True, "spec.training.overlapGradReduce": True},
        "spec.training.overlapParamGather: needs useDistributedOptimizer: true",
    ),
    (
        {"spec.training.overlapParamGather": True, "spec.training.useDistributedOptimizer": True},
        "spec.training.overlapParamGather: needs overlapGradReduce: true",
    ),
    (
        {"spec.training.recompute": {"granularity": "full"}},
        "spec.training.recompute: granularity full needs method (uniform or block) and numLayers; write both",
    ),
    (
        {"spec.training.recompute": {"granularity": "selective", "numLayers": 1}},
        "spec.training.recompute: method and numLayers belong to granularity full; leave them out",
    ),
    # Data, checkpoints, faults, environment
    (
        {"spec.data.path": []},
        "spec.data.path: is missing; write path: [PREFIX] (made by `megatronapp data prepare`), or mock: true",
    ),
    (
        {"spec.model.vocabSize": ...},
        "spec.data.tokenizer: is missing; write tokenizer: tokenizer.json, or model.vocabSize for tokens of another "
        "tokenizer",
    ),
    (
        {"spec.data.mock": True},
        "spec.data.mock: path is given too; leave one of them out",
    ),
    (
        {"spec.data": {"mock": True}, "spec.model.vocabSize": ...},
        "spec.model.vocabSize: is missing; data.mock needs it, for example vocabSize: 1024",
    ),
    (
        {"spec.data.path": ["0.3", "a", "b"]},
        'spec.data.path: a blend takes a weight before every prefix, as in ["0.3", "a", "0.7", "b"]',
    ),
    (
        {"spec.data.path": ["0.3"]},
        "spec.data.path: 0.3 is a weight without a prefix; write the prefix of the .bin/.idx files",
    ),
    (
        {"spec.data.vocabFile": "vocab.json"},
        "spec.data.vocabFile: vocabFile and mergeFile belong together; write both, or tokenizer instead",
    ),
    (
        {"spec.data.vocabFile": "v", "spec.data.mergeFile": "m", "spec.data.tokenizer": "t"},
        "spec.data.tokenizer: vocabFile is given too; leave one of them out",
    ),
    (
        {"spec.data.resetPositionIds": True, "spec.model.positionEmbeddingType": "rope"},
        "spec.data.resetPositionIds: has no effect on rotary positions, which are relative; leave it out",
    ),
    ({"spec.checkpoint.saveInterval": 10}, "spec.checkpoint.saveInterval: needs save: DIRECTORY"),
    ({"spec.checkpoint.finetune": True}, "spec.checkpoint.finetune: needs load: DIRECTORY"),
    ({"spec.faults": [FAULT], "spec.trace.enabled": False}, "spec.faults: need trace.enabled: true"),
    (
        {"spec.faults": [{**FAULT, "rank": 8}]},
        "spec.faults: rank 8 is outside of this job's 8 ranks; write 0 to 7",
    ),
    (
        {"spec.faults": [{**FAULT, "peer": 2}]},
        "spec.faults: peer 2 of rank 1 belongs to kind link; leave it out",
    ),
    (
        {"spec.faults": [{**FAULT, "kind": "link", "peer": 1}]},
        "spec.faults: peer 1 is the rank itself; write the rank it receives from",
    ),
    (
        {"spec.faults": [{**FAULT, "fromStep": 100}]},
        "spec.faults: fromStep 100 of rank 1 is never reached by trainIters 100; write less",
    ),
    (
        {"spec.env": [{"name": "MASTER_ADDR", "value": "x"}]},
        "spec.env: MASTER_ADDR is set by the launcher; leave it out",
    ),
    (
        {"spec.env": [{"name": "A"}, {"name": "A"}]},
        "spec.env: A is given twice; leave one of them out",
    ),
    (
        {"spec.runPolicy": {"backoff": {"initialSeconds": 20, "maxSeconds": 10}}},
        "spec.runPolicy.backoff.maxSeconds: 10 is below initialSeconds 20; write 20 or more",
    ),
]


@pytest.mark.parametrize(("changes", "line"), ROWS, ids=[line[:70] for _, line in ROWS])
def test_a_bad_manifest_is_refused_with_a_single_line(build: Any, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(JobError) as caught:
        load_job(build(changes))
    assert len(caught.value.problems) == 1, caught.value
    assert caught.value.problems[0].startswith(line)
    if not line.endswith((": ", "; ")):
        assert caught.value.problems[0] == line


TEXTS = [
    ("a: [1", "the document: is not YAML: line 1, column 6: expected ',' or ']', but got '<stream end>'"),
    ("a: 1\na: 2\n", "the document: is not YAML: line 2, column 1: a is given twice"),
    ("a: &x 1\nb: *x\n", "the document: is not YAML: line 2, column 4: aliases are not supported; write the value out"),
    (
        "a: !!python/object:os.system 1\n",
        "the document: is not YAML: line 1, column 4: could not determine a constructor",
    ),
    ("", "the document: holds 0 objects; write one MegatronJob per file"),
    ("a: 1\n---\nb: 2\n", "the document: holds 2 objects; write one MegatronJob per file"),
    ("just text\n", "the document: 'just text' is not a block of fields; write a block of fields"),
    ("- 1\n", "the document: a list is not a block of fields; write a block of fields"),
    ("a: " + "[" * 3000 + "]" * 3000, "the document: is nested too deeply; this is not a manifest"),
    ("#" * (1 << 20) + "\n", "the document: passes 1048576 bytes; this is not a manifest"),
]


@pytest.mark.parametrize(("text", "line"), TEXTS, ids=[line for _, line in TEXTS])
def test_a_text_that_is_no_manifest_is_refused_with_a_single_line(text: str, line: str) -> None:
    with pytest.raises(JobError) as caught:
        load_job(text)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(line)


def test_all_problems_of_fields_are_reported_together(build: Any) -> None:
    with pytest.raises(JobError) as caught:
        load_job(build({"kind": ..., "spec.nodes": "2", "spec.model.hiddensize": 3, "spec.training.lr": -1}))
    assert [line.split(":")[0] for line in caught.value.problems] == [
        "kind",
        "spec.nodes",
        "spec.model.hiddensize",
        "spec.training.lr",
    ]
    assert str(caught.value).splitlines() == list(caught.value.problems)


def test_all_problems_between_fields_are_reported_together(build: Any) -> None:
    with pytest.raises(JobError) as caught:
        load_job(build({"spec.model.numLayers": 5, "spec.training.globalBatchSize": 7, "spec.data.path": []}))
    assert [line.split(":")[0] for line in caught.value.problems] == [
        "spec.model.numLayers",
        "spec.data.path",
        "spec.training.globalBatchSize",
    ]


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"spec.nodes": "2", "spec.model.numLayers": 5}, ["spec.nodes", "spec.model.numLayers"]),
        (
            {"metadata.name": "My_Job", "spec.training.globalBatchSize": 7, "spec.checkpoint.saveInterval": 1},
            ["metadata.name", "spec.checkpoint.saveInterval", "spec.training.globalBatchSize"],
        ),
        (
            {"spec.model.numLayers": ..., "spec.model.hiddenSize": 66, "spec.parallelism.virtualPipeline": 1},
            ["spec.model.numLayers", "spec.model.hiddenSize", "spec.parallelism.virtualPipeline"],
        ),
        (
            {"spec.model.hiddenSize": "x", "spec.model.numAttentionHeads": 3, "spec.procPerNode": 3},
            ["spec.model.hiddenSize", "spec.model.numAttentionHeads", "spec.parallelism"],
        ),
        (
            {"spec.faults": [{**FAULT, "kind": "gpu"}, {**FAULT, "rank": 99}], "spec.training.minLr": 1.0},
            ["spec.faults[0].kind", "spec.training.minLr"],
        ),
        ({"spec.data": {"pth": ["a"]}, "spec.training.minLr": 1.0}, ["spec.data.pth", "spec.training.minLr"]),
        ({"spec.model": 4, "spec.training.globalBatchSize": 7}, ["spec.model", "spec.training.globalBatchSize"]),
    ],
)
def test_problems_between_fields_are_reported_with_those_of_single_fields(
    build: Any, changes: dict[str, Any], wrong: list[str]
) -> None:
    with pytest.raises(JobError) as caught:
        load_job(build(changes))
    assert [line.split(":")[0] for line in caught.value.problems] == wrong, caught.value


def test_an_object_that_is_not_plain_data_is_refused(build: Any) -> None:
    with pytest.raises(JobError, match="not plain data"):
        load_job(build({"spec.args": {"a", "b"}}))
