"""Rules about what MegaDPP needs to send messages: the activations of its order.

The arithmetic is that of `job.inbox_memory`, in CEL. Rules see, besides the names of `world`, `cap` (microbatches of
memoryCap; 0 without it, -1 for bytes), `microbatches` (of a step) and `planned` (most chunks whose activations a rank
keeps in the static order). The cap is converted once: Kubernetes 1.30 takes its text to be long, and limits the cost of
all rules. Whether messages fit a memory is found at the start: in CEL those rules would take a tenth of the bytes that
a client-side apply has for the definition.
"""

import re
from collections.abc import Iterator

from megatronapp_common.job.rules.model import GIVEN_CHUNKS, IN_VEE, STAGES
from megatronapp_common.job.rules.rule import Rule, cel_message, cel_message_with, let
from megatronapp_common.job.rules.world import REPLICAS, cel_message_with_sizes, with_gang

_ON = f"(self.dpp.enabled && {STAGES} > 1)"
_CAP = "self.dpp.memoryCap"
_BATCH, _MICRO = "self.training.globalBatchSize", "self.training.microBatchSize"
_SCHEDULE = "(has(self.dpp.schedule) ? self.dpp.schedule : 'auto')"


def _least(first: str, second: str) -> str:
    """Return CEL text of the smaller one of two values."""
    return f"({first} < {second} ? {first} : {second})"


_WARM_UP = (
    f"({IN_VEE} ? 2 * {STAGES} - 1 : {GIVEN_CHUNKS} == 1 ? {STAGES} - 1 : "
    f"2 * ({STAGES} - 1) + ({GIVEN_CHUNKS} - 1) * {STAGES})"
)
_NAMES = (
    ("cap", f"!has({_CAP}) ? 0 : string({_CAP}).endsWith('i') ? -1 : int(string({_CAP}))"),
    ("microbatches", f"has({_BATCH}) ? {_BATCH} / {_MICRO} / {REPLICAS} : 1"),
    ("planned", _least(f"{_WARM_UP} + 1", f"microbatches * {GIVEN_CHUNKS}")),
)
_SIZES = (
    "--seq-length",
    "--hidden-size",
    "--micro-batch-size",
    "--global-batch-size",
    "--dpp-schedule",
    "--dpp-placement",
    "--dpp-memory-cap",
    "--bf16",
    "--sequence-parallel",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
)


def _used(text: str) -> Iterator[tuple[str, str]]:
    """Yield the names that a text needs, innermost first."""
    for name, value in reversed(_NAMES):
        if re.search(rf"(?<![.\w]){name}\b", text):
            yield name, value
            text += value


def _of_messages(rule_id: str, field: str, rule: str, *, unless: str, summary: str, message: str) -> Rule:
    """Return a rule over the names above; it passes without MegaDPP, where the gang's numbers disagree, `unless`."""
    text = cel_message(message)
    for name, value in _used(message):
        text = cel_message_with(name, value, text)
    for name, value in _used(rule):
        rule = let(name, value, rule)
    return Rule(
        id=rule_id,
        field=field,
        rule=f"!{_ON} || {unless} || {with_gang(rule)}",
        message=summary,
        message_expression=cel_message_with_sizes(text),
        args=_SIZES,
    )


_LEAST_CAP = f"{{(planned + {GIVEN_CHUNKS} - 1) / {GIVEN_CHUNKS}}}"

MESSAGE_RULES = (
    _of_messages(
        "cap-of-static-order",
        ".dpp.memoryCap",
        f"cap <= 0 || cap >= (planned + {GIVEN_CHUNKS} - 1) / {GIVEN_CHUNKS}",
        unless=f"!has({_CAP}) || {_SCHEDULE} != 'auto'",
        summary="is below what a rank keeps in the static order; write more, or leave it out",
        message=f"{{{_CAP}}} is too small: a rank keeps the activations of {_LEAST_CAP} microbatches even in "
        f"the static order; write {_LEAST_CAP} or more, or schedule: dfc",
    ),
)
"""Rules about spec.dpp that need the sizes of the model and the gang."""
