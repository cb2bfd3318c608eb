"""Rules about the arguments and the environment of the ranks, restarts, and GPUs."""

from megatronapp_common.job.rules.rule import Rule, cel_message, first_item, no_item
from megatronapp_common.names import Env

RESERVED_ENV = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "NNODES",
    "NPROC_PER_NODE",
    "NODE_IPS",
    "MEGATRON_NODE_IPS",
    "MASTER_ADDR",
    "MASTER_PORT",
    *Env,
)
IS_RESERVED = f"variable.name in [{', '.join(repr(str(name)) for name in RESERVED_ENV)}]"
_TWICE = "!self.env.exists_one(other, other.name == variable.name)"
_FIRST_TWICE = f"self.env.filter(variable, {_TWICE})[0].name"
_TWO_WORDS = "word.startsWith('--') && word.contains(' ') && !word.contains('=')"
_FIRST, _LONGEST = "self.runPolicy.backoff.initialSeconds", "self.runPolicy.backoff.maxSeconds"

RUN_RULES = (
    Rule(
        id="a-gpu-for-each-rank",
        field=".procPerNode",
        rule="!has(self.procPerNode) || self.gpusPerNode == 0 || self.procPerNode <= self.gpusPerNode",
        message="each rank needs its own GPU: write gpusPerNode or less, or gpusPerNode: 0 to train on the CPU",
        message_expression=cel_message(
            "{self.procPerNode} ranks but gpusPerNode {self.gpusPerNode}; each rank needs its own GPU: "
            "write {self.gpusPerNode} or less, or gpusPerNode: 0 to train on the CPU"
        ),
    ),
    Rule(
        id="flag-and-value-apart",
        field=".args",
        rule=no_item("self.args", "word", _TWO_WORDS),
        message="holds a flag and its value as one item; write them as two, as in [--lr, '3']",
        message_expression=first_item(
            "self.args", "word", _TWO_WORDS, "'{word}' is one item; write the flag and its value as two: [--lr, '3']"
        ),
    ),
    Rule(
        id="reserved-variable",
        field=".env",
        rule=no_item("self.env", "variable", IS_RESERVED),
        message="holds a variable that the launcher sets; leave it out",
        message_expression=first_item(
            "self.env", "variable", IS_RESERVED, "{variable.name} is set by the launcher; leave it out"
        ),
    ),
    Rule(
        id="variable-given-twice",
        field=".env",
        rule=no_item("self.env", "variable", _TWICE),
        message="holds a variable twice; leave one of them out",
        message_expression=cel_message(f"{{{_FIRST_TWICE}}} is given twice; leave one of them out"),
        in_schema=True,
    ),
    Rule(
        id="backoff-grows",
        field=".runPolicy.backoff.maxSeconds",
        rule=f"{_LONGEST} >= {_FIRST}",
        message="must not be below initialSeconds",
        message_expression=cel_message(
            f"{{{_LONGEST}}} is below initialSeconds {{{_FIRST}}}; write {{{_FIRST}}} or more"
        ),
    ),
)
