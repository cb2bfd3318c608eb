"""The arithmetic of `job.world` as rules: ranks and workers, with one message for each inconsistency.

Rules see `layout` (parallelism), `served` (replicas that share forward ranks: fbd.backwardPerForward, otherwise 1),
`group` (ranks of `served` replicas on the workers of `nodes`: with MegaFBD forward ranks too, unless they have separate
workers), `wanted` (ranks that parallelism.data needs there, or 0), `nodes` and `per_node` (written or derived), and the
same of forward workers, 0 without them (`wanted_forward`, `forward_nodes`, `forward_per_node`). The sizes have limits
in the schema that keep every product within 64 bits.
"""

import re
from collections.abc import Iterator

from megatronapp_common.job.api.model import MAX_NODES, MAX_PROC_PER_NODE, MAX_RANKS
from megatronapp_common.job.rules.rule import Rule, cel_message, cel_message_with, let, nearest_multiple

_DATA, _PER_NODE = "has(layout.data)", "has(self.procPerNode)"
_GPUS = "self.gpusPerNode"
_TENSOR, _CONTEXT, _STAGES = "layout.tensor", "layout.context", "layout.pipeline"
_FORWARD = "self.fbd.forward"
APART = f"(self.fbd.enabled && has({_FORWARD}))"
"""CEL text: forward ranks have separate workers."""
_MERGED = "self.fbd.ignoreForwardTensorParallel"
_NO_FORWARD = f"(!self.fbd.enabled || has({_FORWARD}))"
"""CEL text: no forward ranks on the workers of `nodes`. With ||, as an annotation stores && in 12 bytes."""
_FORWARD_TENSOR = f"({_MERGED} ? 1 : {_TENSOR})"
_SERVED = f"(!self.fbd.enabled || {_MERGED} ? 1 : self.fbd.backwardPerForward)"
_GROUP = f"(served * {_TENSOR} + ({_NO_FORWARD} ? 0 : {_FORWARD_TENSOR})) * {_CONTEXT} * {_STAGES}"
_OF_SERVED = f"served > 1 ? {cel_message('{served} replicas of ')} : ''"
_OF_CONTEXT = f"{_CONTEXT} > 1 ? {cel_message(f'context {{{_CONTEXT}}} x ')} : ''"
_OF_FORWARD = (
    f"{_NO_FORWARD} ? '' : {_MERGED} ? ', and a forward rank for each tensor group' : "
    "served > 1 ? ', and their forward ranks' : ', forward and backward'"
)
_GROUPS = f"{{{_OF_SERVED}}}tensor {{{_TENSOR}}} x {{{_OF_CONTEXT}}}pipeline {{{_STAGES}}}{{{_OF_FORWARD}}}"
_WHOLE, _IN_GROUPS = "served > 1 ? 'group' : 'replica'", "served > 1 ? ', in groups' : ''"


def _spread(count: str, gpus: str, block: str, *, otherwise: tuple[str, str] = ("", "")) -> tuple[str, str]:
    """Return CEL texts of nodes and ranks of each for a number of ranks, as written in a block or derived.

    `otherwise`: texts in front of the derivation from the number.
    """
    nodes, per_node = f"has({block}.nodes)", f"has({block}.procPerNode)"
    free = f"({gpus} == 0 || {gpus} > {count} ? {count} : {gpus})"  # where neither is written
    return (
        f"{nodes} ? {block}.nodes : {otherwise[0]}{per_node} ? "
        f"({count} < {block}.procPerNode ? 1 : {count} / {block}.procPerNode) : {count} / {free}",
        f"{per_node} ? {block}.procPerNode : {otherwise[1]}{nodes} ? "
        f"({count} < {block}.nodes ? 1 : {count} / {block}.nodes) : {free}",
    )


_WITHOUT_DATA = (f"!{_DATA} ? 1 : ", f"!{_DATA} ? ({_GPUS} > 0 ? {_GPUS} : group / nodes) : ")
_OF_WANTED = _spread("wanted", _GPUS, "self", otherwise=_WITHOUT_DATA)
_OF_FORWARD_RANKS = _spread("wanted_forward", f"{_FORWARD}.gpusPerNode", _FORWARD)
REPLICAS = "(nodes * per_node / group * served)"
"""CEL text over the names below: model replicas."""
RANKS = "(nodes * per_node + wanted_forward)"
"""CEL text over the names below: all ranks."""
WORKERS = "(nodes + forward_nodes)"
"""CEL text over the names below: all workers."""
_NAMES = (
    ("layout", "self.parallelism"),
    ("served", _SERVED),
    ("group", _GROUP),
    ("wanted", f"{_DATA} ? (layout.data + served - 1) / served * group : 0"),
    ("nodes", _OF_WANTED[0]),
    ("per_node", _OF_WANTED[1]),
    (
        "wanted_forward",
        f"{APART} && {REPLICAS} > 0 ? {REPLICAS} / served * {_FORWARD_TENSOR} * {_CONTEXT} * {_STAGES} : 0",
    ),
    ("forward_nodes", f"wanted_forward == 0 ? 0 : {_OF_FORWARD_RANKS[0]}"),
    ("forward_per_node", f"wanted_forward == 0 ? 0 : {_OF_FORWARD_RANKS[1]}"),
)
_WHOLE_GROUPS = "layout.data % served == 0"
_AGREED = f"({_DATA} ? {_WHOLE_GROUPS} && nodes * per_node == wanted : per_node > 0 && nodes * per_node % group == 0)"
_GIVEN_DATA = "has(self.parallelism.data)"
_DERIVED = f"{_GIVEN_DATA} || {_PER_NODE} || {_GPUS} > 0"


def with_sizes(rule: str) -> str:
    """Return CEL text of a rule over the names above. It passes where one group is too large."""
    for name, value in _used(f"group {rule}"):
        if name == "group":
            rule = f"group > {MAX_RANKS} || {rule}"
        rule = let(name, value, rule)
    return rule


def _bound(rule: str) -> str:
    """Return CEL text of a rule over the names above, which judges groups of any size."""
    for name, value in _used(rule):
        rule = let(name, value, rule)
    return rule


def cel_message_with_sizes(message: str) -> str:
    """Return CEL text of a message over the names above."""
    for name, value in _used(message):
        message = cel_message_with(name, value, message)
    return message


def _used(text: str) -> Iterator[tuple[str, str]]:
    """Yield the names that a text needs, innermost first: the local parser takes no deeper nesting than 32."""
    for name, value in reversed(_NAMES):
        if re.search(rf"(?<![.\w]){name}\b", text):
            yield name, value
            text += value


def with_gang(rule: str) -> str:
    """Return CEL text of a rule over a gang whose numbers agree; it passes where they do not."""
    return with_sizes(f"!{_AGREED} || per_node > {MAX_PROC_PER_NODE} || nodes > {MAX_NODES} || {rule}")


_FIX_DATA = (
    f"nodes * per_node % group == 0 ? {cel_message(f'write data: {{{REPLICAS}}}, or leave data out')} : "
    f"{cel_message('make nodes x procPerNode equal to {wanted}')}"
)

WORLD_RULES = (
    Rule(
        id="replica-too-large",
        field=".parallelism",
        rule=_bound(f"group <= {MAX_RANKS}"),
        message=f"a replica may have at most {MAX_RANKS} ranks; write smaller sizes",
        message_expression=cel_message_with_sizes(
            cel_message(
                f"a {{{_WHOLE}}} of {{group}} ranks ({_GROUPS}) is too large; at most {MAX_RANKS} are possible "
                f"({MAX_NODES} nodes of {MAX_PROC_PER_NODE}): write smaller sizes"
            )
        ),
    ),
    Rule(
        id="forward-ranks-serve-one-kind",
        field=".fbd.backwardPerForward",
        rule=f"!self.fbd.enabled || !{_MERGED} || self.fbd.backwardPerForward == 1",
        message="and ignoreForwardTensorParallel exclude each other: a forward rank serves the ranks of a tensor group "
        "or those of several replicas; leave one of them out",
    ),
    Rule(
        id="data-of-forward-ranks",
        field=".parallelism.data",
        rule=f"!{_GIVEN_DATA} || {_bound(_WHOLE_GROUPS)}",
        message="must be a multiple of fbd.backwardPerForward, the replicas that share forward ranks",
        message_expression=cel_message_with_sizes(
            cel_message(
                "{layout.data} is not a multiple of fbd.backwardPerForward {served}, the replicas that share forward "
                f"ranks; write {{{nearest_multiple('layout.data', 'served')}}}"
            )
        ),
    ),
    Rule(
        id="replica-over-nodes",
        field=".procPerNode",
        rule=f"{_DERIVED} || {with_sizes('nodes * per_node == group')}",
        message="is missing, and one replica cannot be spread over the nodes; write procPerNode, or change nodes",
        message_expression=cel_message_with_sizes(
            cel_message(
                f"is missing and {{group}} ranks ({_GROUPS}) cannot be spread over {{nodes}} nodes; "
                f"write procPerNode, or change nodes to a divisor of {{group}}"
            )
        ),
    ),
    Rule(
        id="world-of-replicas",
        field=".parallelism",
        rule=f"{_GIVEN_DATA} || !({_PER_NODE} || {_GPUS} > 0) || {with_sizes('nodes * per_node % group == 0')}",
        message="nodes x procPerNode must be a multiple of tensor x context x pipeline (with fbd: also forward ranks)",
        message_expression=cel_message_with_sizes(
            cel_message(
                f"{{nodes * per_node}} ranks ({{nodes}} nodes x {{per_node}}) cannot be divided into {{{_WHOLE}}}s of "
                f"{{group}} ranks ({_GROUPS}); make nodes x procPerNode a multiple of {{group}}"
            )
        ),
    ),
    Rule(
        id="data-agrees",
        field=".parallelism.data",
        rule=f"!{_GIVEN_DATA} || {with_sizes(f'!({_WHOLE_GROUPS}) || nodes * per_node == wanted')}",
        message="tensor x context x pipeline x data (with fbd, forward ranks too) must be nodes x procPerNode; "
        "leave data out to derive it",
        message_expression=cel_message_with_sizes(
            cel_message(
                f"{{layout.data}} replicas{{{_IN_GROUPS}}} of {{group}} ranks ({_GROUPS}) are {{wanted}} "
                f"ranks, but {{nodes}} nodes x {{per_node}} are {{nodes * per_node}}; {{{_FIX_DATA}}}"
            )
        ),
    ),
    Rule(
        id="ranks-of-a-node",
        field=".nodes",
        rule=with_sizes(f"!{_AGREED} || per_node <= {MAX_PROC_PER_NODE}"),
        message=f"at most {MAX_PROC_PER_NODE} ranks are possible on a node; write more nodes",
        message_expression=cel_message_with_sizes(
            cel_message(
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
        message=f"needs more than {MAX_NODES} nodes; write smaller sizes, or more ranks on each node",
        message_expression=cel_message_with_sizes(
            cel_message(f"needs {{nodes}} nodes of {{per_node}} ranks; at most {MAX_NODES} are possible")
        ),
    ),
)
