"""Examples of the rules about the size of a gang, which an admission policy judges on a cluster."""

from typing import Any

from rule_example import Changes, Example, bad, good
from rule_examples_serve import SERVED

_SAVES: Changes = {
    "spec.checkpoint": {
        "save": "/checkpoints/run",
        "saveInterval": 10,
        "volume": {"claim": "runs", "mountPath": "/checkpoints"},
    }
}
_SIZES: Changes = {"spec.nodes": 4, "spec.parallelism": {"tensor": 2, "pipeline": 2, "data": 4}}
"""Four replicas, each on another node, which share a batch of 8."""


def _elastic(min_data: int = 2, **policy: Any) -> Changes:
    elastic = {"minData": min_data} | policy.pop("elastic", {})
    return {"spec.runPolicy": {"restart": "InPlace", "elastic": elastic} | policy}


_RIGHT: Changes = _elastic() | _SAVES | _SIZES
_QUEUE: Changes = {"spec.scheduling": {"gang": "Kueue", "queue": "team-a"}}
_FAULT = {"kind": "host", "rank": 1, "factor": 2, "fromStep": 2, "steps": 2}
_COPIES: Changes = {"spec.checkpoint.memorySaveInterval": 5, "spec.args": ["--replication"]}
_WHERE = "spec.runPolicy.elastic"

ELASTIC_EXAMPLES: tuple[Example, ...] = (
    *good("elastic-without-queue", _RIGHT),
    *bad(
        "elastic-without-queue",
        _WHERE,
        (_RIGHT | _elastic(restart="Pods") | _QUEUE, "cannot be used with scheduling.gang: Kueue, which admits"),
    ),
    *good("elastic-trains-in-place", _RIGHT),
    *bad(
        "elastic-trains-in-place",
        _WHERE,
        (_RIGHT | _elastic(restart="Pods"), "needs mode: train and runPolicy.restart: InPlace"),
        (_RIGHT | {"spec.faults": [_FAULT]}, "without fbd.enabled, dpp.enabled"),
        (SERVED | _elastic(), "needs mode: train"),
    ),
    *good("elastic-saves", _RIGHT),
    *bad(
        "elastic-saves",
        _WHERE,
        (_elastic() | _SIZES, "needs checkpoint.saveInterval, checkpoint.volume"),
        (_RIGHT | {"spec.checkpoint.saveInterval": None}, "resumes from the checkpoints of the one before"),
        (_RIGHT | {"spec.checkpoint.volume": None, "spec.checkpoint.save": "run"}, "checkpoint.volume"),
        (_RIGHT | {"spec.checkpoint.save": "/checkpoint/run"}, "checkpoint.save below its mountPath"),
    ),
    *good("elastic-batch-in-fields", _RIGHT | {"spec.args": ["--log-interval", "2"]}),
    *bad(
        "elastic-batch-in-fields",
        "spec.args",
        (_RIGHT | {"spec.args": ["--global-batch-size", "12"]}, "no flag of batches or of the layout"),
        (_RIGHT | {"spec.args": ["--expert-model-parallel-size", "2"]}, "which are fields of training and parallelism"),
        (_RIGHT | {"spec.args": ["--profile", "--profile-ranks", "0", "15"]}, "for one number of replicas"),
        (_RIGHT | {"spec.args": ["--hf-dataset", "/data/text"]}, "none of --profile-ranks, --hf-dataset"),
        (_RIGHT | {"spec.args": ["--replication", "--replication-jump=8"]}, "--replication-jump"),
        (_RIGHT | {"spec.args": ["--node-ips=10.0.0.1,10.0.0.2"]}, "--node-ips and --multi-node, which are for one"),
        (_RIGHT | {"spec.args": ["--multi-node"]}, "which are for one number of replicas"),
        (_RIGHT | {"spec.args": ["--use-dpp"]}, "neither --use-dpp nor --forward-backward-disaggregating"),
        (_RIGHT | {"spec.args": ["--forward-backward-disaggregating"]}, "neither --use-dpp nor"),
        (_RIGHT | {"spec.args": ["--micro-batch-size=2"]}, "fields of training and parallelism"),
    ),
    *good("elastic-sizes-are-written", _RIGHT),
    *bad(
        "elastic-sizes-are-written",
        _WHERE,
        (_RIGHT | {"spec.nodes": None}, "needs nodes, parallelism.data and training.globalBatchSize"),
        (_RIGHT | {"spec.parallelism": {"tensor": 2, "pipeline": 2}}, "needs nodes, parallelism.data"),
        (_RIGHT | {"spec.training.globalBatchSize": None}, "training.globalBatchSize"),
    ),
    *good("elastic-size", _RIGHT, _RIGHT | _elastic(1)),
    *bad(
        "elastic-size",
        f"{_WHERE}.minData",
        (_RIGHT | _elastic(3), "3 replicas cannot replace 4: they must be fewer"),
        (_RIGHT | _elastic(4), "possible up to 16: [1, 2]"),
        (_RIGHT | _elastic(3) | {"spec.training.globalBatchSize": 24, "spec.nodes": 2, "spec.procPerNode": 8},
         "possible up to 16: [2]"),
    ),
    *good("elastic-copies", _RIGHT | _COPIES, _RIGHT | _elastic(1)),
    *bad("elastic-copies", f"{_WHERE}.minData", (_RIGHT | _elastic(1) | _COPIES, "must leave 2 workers or more")),
    *good("elastic-patience", _RIGHT | _elastic(startDeadlineSeconds=301)),
    *bad(
        "elastic-patience",
        f"{_WHERE}.patienceSeconds",
        (_RIGHT | _elastic(startDeadlineSeconds=300), "must be below runPolicy.startDeadlineSeconds"),
    ),
)  # fmt: skip
