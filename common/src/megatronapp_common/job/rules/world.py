"""How many ranks, on which workers: the arithmetic of `job.world` as rules, one message for each way to disagree.

Rules see `replica` (ranks of one replica), `wanted` (ranks that parallelism.data asks for, else 0), `nodes` and
`per_node` (written or derived). The sizes have limits in the schema that keep every product within 64 bits.
"""

from megatronapp_common.job.model import MAX_NODES, MAX_PROC_PER_NODE, MAX_RANKS
from megatronapp_common.job.rules.rule import Rule, let, let_say, say

_DATA, _NODES, _PER_NODE = "has(self.parallelism.data)", "has(self.nodes)", "has(self.procPerNode)"
_GPUS = "self.gpusPerNode"
_TENSOR, _CONTEXT, _STAGES = "self.parallelism.tensor", "self.parallelism.context", "self.parallelism.pipeline"
_REPLICA = f"{_TENSOR} * {_CONTEXT} * {_STAGES}"
_OF_CONTEXT = f"{_CONTEXT} > 1 ? {say(f'context {{{_CONTEXT}}} x ')} : ''"
_GROUPS = f"tensor {{{_TENSOR}}} x {{{_OF_CONTEXT}}}pipeline {{{_STAGES}}}"
_FREE = f"({_GPUS} > 0 && {_GPUS} < wanted ? {_GPUS} : wanted)"  # ranks of a worker where only data is given
_NAMES = (
    ("replica", _REPLICA),
    ("wanted", f"{_DATA} ? replica * self.parallelism.data : 0"),
    (
        "nodes",
        f"{_NODES} ? self.nodes : !{_DATA} ? 1 : "
        f"{_PER_NODE} ? (wanted < self.procPerNode ? 1 : wanted / self.procPerNode) : wanted / {_FREE}",
    ),
    (
        "per_node",
        f"{_PER_NODE} ? self.procPerNode : !{_DATA} ? ({_GPUS} > 0 ? {_GPUS} : replica / nodes) : "
        f"{_NODES} ? (wanted < nodes ? 1 : wanted / nodes) : {_FREE}",
    ),
)
_POSSIBLE = f"{_REPLICA} <= {MAX_RANKS}"
_AGREED = f"({_DATA} ? nodes * per_node == wanted : per_node > 0 && nodes * per_node % replica == 0)"
_DERIVED = f"{_DATA} || {_PER_NODE} || {_GPUS} > 0"


def with_sizes(rule: str) -> str:
    """CEL text of a rule over the names above. Silent where one replica is too large."""
    for name, value in reversed(_NAMES):
        rule = let(name, value, rule)
    return f"{_REPLICA} > {MAX_RANKS} || {rule}"


def say_with_sizes(message: str) -> str:
    """CEL text of a message over the names above."""
    for name, value in reversed(_NAMES):
        message = let_say(name, value, message)
    return message


def with_gang(rule: str) -> str:
    """CEL text of a rule over a gang whose numbers agree; silent where they do not."""
    return with_sizes(f"!{_AGREED} || per_node > {MAX_PROC_PER_NODE} || nodes > {MAX_NODES} || {rule}")


_FIX_DATA = (
    f"nodes * per_node % replica == 0 ? {say('write data: {nodes * per_node / replica}, or leave data out')} : "
    f"{say('make nodes x procPerNode equal to {wanted}')}"
)

WORLD_RULES = (
    Rule(
        id="replica-too-large",
        field=".parallelism",
        rule=_POSSIBLE,
        says=f"a replica may have at most {MAX_RANKS} ranks; write smaller sizes",
        message=say(
            f"a replica of {{{_REPLICA}}} ranks ({_GROUPS}) is too large; at most {MAX_RANKS} are possible "
            f"({MAX_NODES} nodes of {MAX_PROC_PER_NODE}): write smaller sizes"
        ),
    ),
    Rule(
        id="replica-over-nodes",
        field=".procPerNode",
        rule=f"{_DERIVED} || {with_sizes('nodes * per_node == replica')}",
        says="is missing, and one replica cannot be spread over the nodes; write procPerNode, or change nodes",
        message=say_with_sizes(
            say(
                f"is missing and {{replica}} ranks ({_GROUPS}) cannot be spread over {{nodes}} nodes; "
                f"write procPerNode, or change nodes to a divisor of {{replica}}"
            )
        ),
    ),
    Rule(
        id="world-of-replicas",
        field=".parallelism",
        rule=f"{_DATA} || !({_PER_NODE} || {_GPUS} > 0) || {with_sizes('nodes * per_node % replica == 0')}",
        says="nodes x procPerNode must be a multiple of tensor x context x pipeline",
        message=say_with_sizes(
            say(
                f"{{nodes * per_node}} ranks ({{nodes}} nodes x {{per_node}}) cannot be divided into replicas of "
                f"{{replica}} ranks ({_GROUPS}); make nodes x procPerNode a multiple of {{replica}}"
            )
        ),
    ),
    Rule(
        id="data-agrees",
        field=".parallelism.data",
        rule=f"!{_DATA} || {with_sizes('nodes * per_node == wanted')}",
        says="tensor x context x pipeline x data must be nodes x procPerNode; leave data out to derive it",
        message=say_with_sizes(
            say(
                f"{{self.parallelism.data}} replicas of {{replica}} ranks ({_GROUPS}) are {{wanted}} ranks, "
                f"but {{nodes}} nodes x {{per_node}} are {{nodes * per_node}}; {{{_FIX_DATA}}}"
            )
        ),
    ),
    Rule(
        id="ranks-of-a-node",
        field=".nodes",
        rule=with_sizes(f"!{_AGREED} || per_node <= {MAX_PROC_PER_NODE}"),
        says=f"at most {MAX_PROC_PER_NODE} ranks are possible on a node; write more nodes",
        message=say_with_sizes(
            say(
                f"{{nodes * per_node}} ranks on {{nodes}} nodes are {{per_node}} on each, at most {MAX_PROC_PER_NODE} "
                f"are possible; write nodes: "
                f"{{(nodes * per_node + {MAX_PROC_PER_NODE - 1}) / {MAX_PROC_PER_NODE}}} or more"
            )
        ),
    ),
    Rule(
        id="nodes-of-a-gang",
        field=".parallelism",
        rule=with_sizes(f"!{_AGREED} || per_node > {MAX_PROC_PER_NODE} || nodes <= {MAX_NODES}"),
        says=f"needs more than {MAX_NODES} nodes; write smaller sizes, or more ranks on each node",
        message=say_with_sizes(say(f"needs {{nodes}} nodes of {{per_node}} ranks; at most {MAX_NODES} are possible")),
    ),
)
