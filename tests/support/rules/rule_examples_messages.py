"""Examples of the rules about what MegaDPP needs to send messages."""

from rule_example import Changes, bad, good
from rule_examples_runtimes import dpp

_BATCH = "spec.training.globalBatchSize"
_SINGLE_NODE: Changes = {"spec.nodes": 1}

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
]
