"""Examples of the rules about what MegaDPP needs to send messages."""

from rule_example import bad, good
from rule_examples_runtimes import dpp

_BATCH = "spec.training.globalBatchSize"

MESSAGE_EXAMPLES = [
    *good(
        "cap-of-static-order",
        dpp(memoryCap=2),
        dpp(memoryCap="2"),
        dpp(memoryCap="1Gi"),
        dpp(memoryCap=1, schedule="dfc"),
        dpp(memoryCap=1) | {_BATCH: 2},
        dpp(memoryCap=3, chunks=2),
        dpp(memoryCap=2, chunks=2, placement="vee"),
        dpp(memoryCap=9999999999),
        dpp(memoryCap=1) | {"spec.args": ["--dpp-memory-cap", "2"]},
    ),
    *bad(
        "cap-of-static-order",
        "spec.dpp.memoryCap",
        (dpp(memoryCap=1), "1 is too small: a rank keeps the activations of 2 microbatches even in the"),
        (dpp(memoryCap=2, chunks=2), "2 is too small: a rank keeps the activations of 3 microbatches"),
        (dpp(memoryCap=1, chunks=2, placement="vee"), "1 is too small: a rank keeps the activations of 2 microbatches"),
    ),
]
