"""Examples of the rules about what MegaDPP needs to send messages."""

from rule_example import Changes, bad, good
from rule_examples_runtimes import dpp

_BATCH = "spec.training.globalBatchSize"
_SINGLE_NODE: Changes = {"spec.nodes": 1}
_LARGE: Changes = {"spec.model.seqLength": 4096, "spec.model.hiddenSize": 8192, "spec.training.precision": "bf16"}
"""Messages of 64 MiB."""
_MOST: Changes = {
    "spec.model.seqLength": 2**31 - 1,
    "spec.model.hiddenSize": 2**31 - 4,
    "spec.training.microBatchSize": 2**28,
    "spec.training.globalBatchSize": 2**30,
}
"""Messages of more bytes than 64 bits count."""


def limited(memory: str | int) -> Changes:
    return {"spec.resources.limits": {"memory": memory}}


MESSAGE_EXAMPLES = [
    *good(
        "dpp-gpus-on-one-node",
        dpp(),
        _SINGLE_NODE | dpp() | {"spec.gpusPerNode": 4},
        dpp() | {"spec.gpusPerNode": 4, "spec.nodes": None, "spec.parallelism.data": 1},
        {"spec.gpusPerNode": 4},
    ),
    *bad(
        "dpp-gpus-on-one-node",
        "spec.nodes",
        (dpp() | {"spec.gpusPerNode": 4}, "GPUs of a pipeline are on 2 nodes, and messages of dpp between GPUs stay"),
        (
            dpp() | {"spec.gpusPerNode": 4, "spec.nodes": None, "spec.parallelism.data": 2},
            "write nodes: 1, gpusPerNode: 0 for the CPU, or leave dpp out",
        ),
    ),
    *good(
        "cap-of-static-order",
        dpp(memoryCap=2),
        dpp(memoryCap="2"),
        dpp(memoryCap="1Gi"),
        dpp(memoryCap=1, schedule="dfc"),
        dpp(memoryCap=1) | {_BATCH: 2},
        dpp(memoryCap=3, chunks=2),
        dpp(memoryCap=9999999999),
        dpp(memoryCap=1) | {"spec.args": ["--dpp-memory-cap", "2"]},
    ),
    *bad(
        "cap-of-static-order",
        "spec.dpp.memoryCap",
        (dpp(memoryCap=1), "1 is too small: the first stage keeps the activations of 2 microbatches even in the"),
        (dpp(memoryCap=2, chunks=2), "2 is too small: the first stage keeps the activations of 3 microbatches"),
    ),
    *good("slots-of-messages", dpp(memoryCap=4094, schedule="dfc") | {_BATCH: 8190}),
    *bad(
        "slots-of-messages",
        "spec.dpp",
        (dpp(memoryCap=4095, schedule="dfc") | {_BATCH: 8190}, "keeps activations of 4095 chunks at a time"),
        (
            dpp(chunks=2**29) | {"spec.model.numLayers": 2**30, _BATCH: 2**30},
            "write a smaller memoryCap, or fewer chunks",
        ),
    ),
    *good(
        "messages-within-shm",
        _SINGLE_NODE | _LARGE | dpp() | {"spec.shm.sizeLimit": "2Gi"},
        _LARGE | dpp() | {"spec.shm.sizeLimit": "1Mi"},
        _SINGLE_NODE | _LARGE | dpp() | {"spec.shm.sizeLimit": "1Mi", "spec.gpusPerNode": 4},
        _SINGLE_NODE | _LARGE | {"spec.shm.sizeLimit": "1Mi"},
        _SINGLE_NODE | _LARGE | dpp() | {"spec.shm.sizeLimit": "1Mi", "spec.args": ["--seq-length=64"]},
        _SINGLE_NODE | _LARGE | dpp() | {"spec.shm.sizeLimit": "9e18"},
    ),
    *bad(
        "messages-within-shm",
        "spec.shm.sizeLimit",
        (
            _SINGLE_NODE | _LARGE | dpp() | {"spec.shm.sizeLimit": "1Gi"},
            "1Gi is too small: dpp needs space for 4 x 5 messages of 67108864 bytes; leave sizeLimit out, write more",
        ),
        (_SINGLE_NODE | _MOST | dpp() | {"spec.shm.sizeLimit": "1Ei"}, "is too small for the messages of dpp"),
        (
            _SINGLE_NODE | _LARGE | dpp(schedule="bfc", chunks=2) | {"spec.shm.sizeLimit": 1000000},
            "4 x 10 messages of 67108864 bytes",
        ),
        (
            {"spec.procPerNode": 9, "spec.parallelism.tensor": 1, "spec.parallelism.pipeline": 3}
            | {"spec.model.numLayers": 6, "spec.training.globalBatchSize": 18, "spec.shm.sizeLimit": "1Gi"}
            | _LARGE
            | dpp(schedule="static"),
            "1Gi is too small: dpp needs space for 6 x 5 messages of 67108864 bytes",
        ),
    ),
    *good(
        "messages-within-memory",
        _SINGLE_NODE | _LARGE | dpp() | limited("2Gi"),
        _SINGLE_NODE | _LARGE | dpp() | limited("1Gi") | {"spec.gpusPerNode": 4},
        _LARGE | dpp() | limited("1Mi"),
    ),
    *bad(
        "messages-within-memory",
        "spec.resources.limits",
        (
            _SINGLE_NODE | _LARGE | dpp() | limited("1Gi"),
            "memory 1Gi is too small: dpp needs space for 4 x 5 messages of",
        ),
        (
            _SINGLE_NODE | _LARGE | dpp() | limited(1000),
            "in /dev/shm, which is charged to it; write more, or a smaller",
        ),
    ),
]
