"""Examples of the rules about workers, ranks, batches and faults, and of those about changes."""

from typing import Any

from rule_example import Changes, Example, bad, good, stays


def _fault(**changes: Any) -> dict[str, Any]:
    return {"rank": 1, "kind": "compute", "factor": 3, "fromStep": 10, "steps": 5} | changes


def _faults(*faults: dict[str, Any]) -> Changes:
    return {"spec.faults": list(faults)}


_SINGLE_RANK: Changes = {"spec.nodes": 1, "spec.procPerNode": 1, "spec.parallelism": {}}
_EXPERTS: Changes = {"spec.args": ["--num-experts", "12"], "spec.model.disableBiasLinear": True}
_RAMP = "spec.training.rampupBatchSize"
_BATCH = "spec.training.globalBatchSize"
_SUSPENDED: Changes = {"spec.suspend": True}

_RUN = [
    *good(
        "expert-of-replicas",
        _EXPERTS | {"spec.parallelism": {"tensor": 1, "data": 8, "expert": 4}},
        _EXPERTS | {"spec.parallelism": {"tensor": 1, "expert": 2}},
    ),
    *bad(
        "expert-of-replicas",
        "spec.parallelism.expert",
        (_EXPERTS | {"spec.parallelism": {"tensor": 1, "data": 8, "expert": 3}}, "3 does not divide the 8 replicas"),
        (_EXPERTS | {"spec.parallelism": {"tensor": 1, "expert": 3}}, "3 does not divide the 8 replicas"),
    ),
    *good("a-gpu-for-each-rank", {"spec.gpusPerNode": 4}, {"spec.gpusPerNode": 8}),
    *bad(
        "a-gpu-for-each-rank",
        "spec.procPerNode",
        ({"spec.gpusPerNode": 2}, "4 ranks but gpusPerNode 2; each rank needs its own GPU: write 2 or less"),
    ),
    *good("reserved-variable", {"spec.env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}),
    *bad(
        "reserved-variable",
        "spec.env",
        ({"spec.env": [{"name": "A"}, {"name": "MASTER_ADDR"}]}, "MASTER_ADDR is set by the launcher; leave it out"),
        ({"spec.env": [{"name": "NNODES", "value": "4"}]}, "NNODES is set by the launcher; leave it out"),
        ({"spec.env": [{"name": "NPROC_PER_NODE"}]}, "NPROC_PER_NODE is set by the launcher; leave it out"),
        ({"spec.env": [{"name": "MEGATRON_NODE_IPS"}]}, "MEGATRON_NODE_IPS is set by the launcher; leave it out"),
        ({"spec.env": [{"name": "MEGATRONAPP_JOB"}]}, "MEGATRONAPP_JOB is set by the launcher; leave it out"),
        (
            {"spec.env": [{"name": "RANK"}, {"name": "A"}, {"name": "WORLD_SIZE"}]},
            "RANK is set by the launcher; leave it out (and 1 more)",
        ),
    ),
    *good("flag-and-value-apart", {"spec.args": ["--lr", "3", "--name=two words", "two words"]}),
    *bad(
        "flag-and-value-apart",
        "spec.args",
        ({"spec.args": ["--lr", "3", "--min-lr 1"]}, "'--min-lr 1' is one item; write the flag and its value as two"),
    ),
    *good("variable-given-twice", {"spec.env": [{"name": "A"}, {"name": "B"}]}),
    Example(
        rule_id="variable-given-twice",
        good=False,
        change={"spec.env": [{"name": "A", "value": "1"}, {"name": "A"}]},
        field="spec.env",
        message="A is given twice; leave one of them out",
        server_message="Duplicate value",
    ),
    *good("backoff-grows", {"spec.runPolicy.backoff": {"initialSeconds": 20, "maxSeconds": 20}}),
    *bad(
        "backoff-grows",
        "spec.runPolicy.backoff.maxSeconds",
        ({"spec.runPolicy.backoff": {"initialSeconds": 20, "maxSeconds": 10.5}}, "10.5 is below initialSeconds 20"),
    ),
]
_WORLD = [
    *good("replica-too-large", {**_SINGLE_RANK, "spec.training.globalBatchSize": None}),
    *bad(
        "replica-too-large",
        "spec.parallelism",
        (
            {"spec.parallelism.pipeline": 262144, "spec.model.numLayers": 262144},
            "a replica of 524288 ranks (tensor 2 x pipeline 262144) is too large; at most 262144 are possible",
        ),
    ),
    *good("replica-over-nodes", {"spec.procPerNode": None}, {"spec.procPerNode": None, "spec.nodes": None}),
    *bad(
        "replica-over-nodes",
        "spec.procPerNode",
        (
            {"spec.nodes": 3, "spec.procPerNode": None},
            "is missing and 4 ranks (tensor 2 x pipeline 2) cannot be spread over 3 nodes; write procPerNode",
        ),
        ({"spec.nodes": 5, "spec.procPerNode": None}, "over 5 nodes; write procPerNode, or change nodes to a divisor"),
    ),
    *good("world-of-replicas", {"spec.nodes": 4}),
    *bad(
        "world-of-replicas",
        "spec.parallelism",
        (
            {"spec.procPerNode": 3},
            "6 ranks (2 nodes x 3) cannot be divided into replicas of 4 ranks (tensor 2 x pipeline 2); "
            "make nodes x procPerNode a multiple of 4",
        ),
        ({"spec.procPerNode": None, "spec.nodes": 1, "spec.gpusPerNode": 6}, "6 ranks (1 nodes x 6) cannot be divided"),
    ),
    *good(
        "data-agrees",
        {"spec.parallelism.data": 2},
        {"spec.parallelism.data": 4, "spec.nodes": None, "spec.procPerNode": None, "spec.gpusPerNode": 8},
    ),
    *bad(
        "data-agrees",
        "spec.parallelism.data",
        (
            {"spec.parallelism.data": 3},
            "3 replicas of 4 ranks (tensor 2 x pipeline 2) are 12 ranks, but 2 nodes x 4 are 8; "
            "write data: 2, or leave data out",
        ),
        (
            {"spec.parallelism.data": 3, "spec.procPerNode": None, "spec.nodes": 5},
            "are 12 ranks, but 5 nodes x 2 are 10; make nodes x procPerNode equal to 12",
        ),
        (
            {"spec.parallelism.data": 1, "spec.procPerNode": None, "spec.nodes": 8},
            "but 8 nodes x 1 are 8; write data: 2",
        ),
    ),
    *good(
        "ranks-of-a-node",
        {
            "spec.nodes": None,
            "spec.procPerNode": None,
            "spec.parallelism.data": 16,
            "spec.training.globalBatchSize": 16,
        },
    ),
    *bad(
        "ranks-of-a-node",
        "spec.nodes",
        (
            {"spec.nodes": None, "spec.procPerNode": None, "spec.parallelism.data": 50},
            "200 ranks on 1 nodes are 200 on each, at most 64 are possible; write nodes: 4 or more",
        ),
    ),
    *good(
        "nodes-of-a-gang",
        {
            "spec.nodes": None,
            "spec.procPerNode": 1,
            "spec.parallelism.data": 1024,
            "spec.training.globalBatchSize": None,
        },
    ),
    *bad(
        "nodes-of-a-gang",
        "spec.parallelism",
        (
            {"spec.nodes": None, "spec.procPerNode": 1, "spec.parallelism.data": 500_000_000},
            "needs 2000000000 nodes of 1 ranks; at most 4096 are possible",
        ),
    ),
]
_GANG = [
    *good("ranks-of-gpus", {"spec.gpusPerNode": 4, "spec.procPerNode": None, "spec.parallelism.data": 2}),
    *bad(
        "ranks-of-gpus",
        "spec.nodes",
        (
            {"spec.gpusPerNode": 2, "spec.procPerNode": None, "spec.parallelism.data": 2},
            "2 nodes of 2 GPUs cannot hold 8 ranks; write nodes: 4",
        ),
    ),
    *good("batch-of-replicas", {_BATCH: 6}, {_BATCH: None}),
    *bad(
        "batch-of-replicas",
        _BATCH,
        ({_BATCH: 7}, "7 is not a multiple of microBatchSize 1 x 2 replicas; write 8"),
        (
            {_BATCH: 1, "spec.training.microBatchSize": 4},
            "1 is not a multiple of microBatchSize 4 x 2 replicas; write 8",
        ),
    ),
    *good("batch-of-interleaved-stages", {"spec.parallelism.virtualPipeline": 2, _BATCH: 4}),
    *bad(
        "batch-of-interleaved-stages",
        _BATCH,
        (
            {"spec.parallelism.virtualPipeline": 2, _BATCH: 6},
            "6 gives 3 microbatches, and the interleaved schedule needs a multiple of pipeline 2; write 8",
        ),
        ({"spec.parallelism.virtualPipeline": 2, _BATCH: None}, "2 gives 1 microbatches"),
    ),
    *good("ramp-needs-goal", {_RAMP: [2, 2, 100]}),
    *bad("ramp-needs-goal", _BATCH, ({_RAMP: [2, 2, 100], _BATCH: None}, "is missing; rampupBatchSize needs it")),
    *good(
        "ramp-of-replicas",
        {_RAMP: [2, 6, 100]},
        {_RAMP: [3, 5, 9], "spec.args": ["--rampup-batch-size", "2", "2", "9"]},
    ),
    *bad(
        "ramp-of-replicas",
        _RAMP,
        (
            {_RAMP: [3, 5, 100]},
            "start 3 and increment 5 must be multiples of 2 (microBatchSize x data); write [4, 6, ...]",
        ),
        ({_RAMP: [3, 4, 100]}, "write [4, 4, ...]"),
    ),
    *good(
        "ramp-reaches-goal",
        {_RAMP: [8, 2, 100]},
        {_RAMP: [6, 4, 9], "spec.args": ["--rampup-batch-size", "2", "2", "9"]},
    ),
    *bad(
        "ramp-reaches-goal",
        _RAMP,
        ({_RAMP: [6, 4, 100]}, "6 does not reach globalBatchSize 8 in steps of 4"),
        ({_RAMP: [10, 2, 100]}, "10 does not reach globalBatchSize 8 in steps of 2"),
    ),
    *good("windows-need-trace", {"spec.trace.granularity": "base", "spec.trace.enabled": True}),
    *bad(
        "windows-need-trace",
        "spec.trace",
        ({"spec.trace.interval": 5, "spec.trace.enabled": False}, "need enabled: true"),
    ),
    *good(
        "windows-of-roles",
        {"spec.fbd.enabled": True, "spec.trace.interval": 5, "spec.trace.granularity": "base"},
        {"spec.fbd.enabled": True, "spec.trace.interval": 5, "spec.args": ["--trace-granularity=base"]},
        {"spec.trace.interval": 5, "spec.trace.granularity": "full"},
        {"spec.fbd.enabled": True},
    ),
    *bad(
        "windows-of-roles",
        "spec.trace.granularity",
        ({"spec.fbd.enabled": True, "spec.trace.interval": 5}, "must be base with fbd.enabled (it is full by default)"),
        ({"spec.fbd.enabled": True, "spec.trace.continuousIterations": 5}, "write granularity: base"),
        ({"spec.fbd.enabled": True, "spec.trace.granularity": "full"}, "write granularity: base"),
    ),
    *good(
        "directory-of-plain-pipeline",
        {"spec.trace.directory": "spans"},
        {
            "spec.trace.directory": "spans",
            "spec.parallelism.virtualPipeline": 2,
            "spec.args": ["--num-virtual-stages-per-pipeline-rank", "1"],
        },
    ),
    *bad(
        "directory-of-plain-pipeline",
        "spec.trace.directory",
        *(
            (
                {"spec.trace.directory": "spans"} | change,
                "cannot be combined with virtualPipeline, dpp or fbd, for which MegatronApp's files have no place",
            )
            for change in (
                {"spec.parallelism.virtualPipeline": 2},
                {"spec.dpp.enabled": True},
                {"spec.fbd.enabled": True, "spec.trace.granularity": "base"},
                {"spec.fbd.enabled": True},
            )
        ),
    ),
    *good("faults-need-trace", _faults(_fault()), {"spec.trace.enabled": False}),
    *bad(
        "faults-need-trace",
        "spec.faults",
        ({**_faults(_fault()), "spec.trace.enabled": False}, "need trace.enabled: true"),
    ),
    *good("fault-within-ranks", _faults(_fault(rank=7))),
    *bad(
        "fault-within-ranks",
        "spec.faults",
        (_faults(_fault(), _fault(rank=8)), "rank 8 is outside of this job's 8 ranks; write 0 to 7"),
        (_faults(_fault(rank=99), _fault(rank=8), _fault(rank=9)), "write 0 to 7 (and 2 more)"),
    ),
    *good("peer-within-ranks", _faults(_fault(kind="link", peer=7))),
    *bad(
        "peer-within-ranks",
        "spec.faults",
        (_faults(_fault(kind="link", peer=8)), "peer 8 is outside of this job's 8 ranks; write 0 to 7"),
    ),
    *good("peer-of-link", _faults(_fault(kind="link", peer=2))),
    *bad(
        "peer-of-link",
        "spec.faults",
        (_faults(_fault(peer=2)), "peer 2 of rank 1 belongs to kind link; leave it out"),
    ),
    *good("peer-is-another", _faults(_fault(kind="link", peer=0))),
    *bad(
        "peer-is-another",
        "spec.faults",
        (_faults(_fault(kind="link", peer=1)), "peer 1 is the rank itself; write the rank it receives from"),
    ),
    *good("fault-within-steps", _faults(_fault(fromStep=99))),
    *bad(
        "fault-within-steps",
        "spec.faults",
        (_faults(_fault(fromStep=100)), "fromStep 100 of rank 1 is never reached by trainIters 100; write less"),
    ),
]
_CHANGES = [
    *stays("mode-stays", "spec.mode", good=[({}, {"spec.mode": "train"})], bad=[]),
    *stays(
        "model-stays",
        "spec.model",
        good=[({}, {}), (_SUSPENDED, {"spec.model.swiglu": False})],
        bad=[
            ({}, {"spec.model.numLayers": 8}, "cannot change, as checkpoints hold the old shape; make a new job"),
            (_SUSPENDED, {"spec.model.vocabSize": 128}, "cannot change, as checkpoints hold the old shape"),
        ],
    ),
    *stays(
        "nodes-stay",
        "spec.nodes",
        good=[(_SUSPENDED, {"spec.nodes": 4}), (_SUSPENDED, {"spec.nodes": None}), ({}, _SUSPENDED)],
        bad=[
            ({}, {"spec.nodes": 4}, "was 2 and is now 4; it may change only while the job is suspended"),
            ({}, {"spec.nodes": 4, "spec.suspend": True}, "was 2 and is now 4"),
            ({}, {"spec.nodes": None}, "was 2 and is now omitted"),
            ({"spec.nodes": None}, {"spec.nodes": 1}, "was omitted and is now 1"),
        ],
    ),
    *stays(
        "ranks-stay",
        "spec.procPerNode",
        good=[(_SUSPENDED, {"spec.procPerNode": 2})],
        bad=[({}, {"spec.procPerNode": 2}, "was 4 and is now 2; it may change only while the job is suspended")],
    ),
    *stays(
        "gpus-stay",
        "spec.gpusPerNode",
        good=[(_SUSPENDED, {"spec.gpusPerNode": 4}), ({}, {"spec.gpusPerNode": 0})],
        bad=[({}, {"spec.gpusPerNode": 4}, "was 0 and is now 4; it may change only while the job is suspended")],
    ),
    *stays(
        "layout-stays",
        "spec.parallelism",
        good=[(_SUSPENDED, {"spec.parallelism": {"tensor": 4}}), ({}, {"spec.parallelism.context": 1})],
        bad=[({}, {"spec.parallelism": {"tensor": 4}}, "may change only while the job is suspended")],
    ),
    *stays(
        "batch-stays",
        _BATCH,
        good=[(_SUSPENDED, {_BATCH: 16}), ({}, {"spec.training.trainIters": 200, "spec.training.lr": 0.1})],
        bad=[
            ({}, {_BATCH: 16}, "was 8 and is now 16; it may change only while the job is suspended"),
            ({}, {_BATCH: None}, "was 8 and is now omitted"),
        ],
    ),
]
WORLD_EXAMPLES = (*_RUN, *_WORLD, *_GANG, *_CHANGES)
