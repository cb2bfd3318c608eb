"""Permitted connections under a set of NetworkPolicies, by the rules of networking.k8s.io/v1.

No network plugin enforces policies where the tests run, so the objects are judged by what Kubernetes says they mean:
a pod that no ingress policy selects lets every connection in; one that some select lets in what any rule of any of them
allows. Only what our policies use is understood, and any other field is an error, never a guess.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Object = Mapping[str, Any]
KNOWN = {
    "spec": {"podSelector", "policyTypes", "ingress"},
    "rule": {"from", "ports"},
    "peer": {"podSelector", "namespaceSelector"},
    "port": {"protocol", "port"},
    "selector": {"matchLabels", "matchExpressions"},
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A pod, as a policy sees it."""

    namespace: str
    labels: Mapping[str, str]
    host_network: bool = False
    """Its connections have the address of its node, and policies do not hold for it."""


def may_connect(policies: Iterable[Object], source: Place, target: Place, port: int) -> bool:
    """Return whether a TCP connection is permitted."""
    if target.host_network:
        return True
    chosen = [policy for policy in policies if _selects(policy, target)]
    return not chosen or any(
        _allows(rule, policy["metadata"]["namespace"], source, port)
        for policy in chosen
        for rule in policy["spec"].get("ingress", [])
    )


def fits(selector: Object, labels: Mapping[str, str]) -> bool:
    """Return whether a label selector selects these labels; an empty one selects all."""
    _only(selector, "selector")
    pairs = selector.get("matchLabels", {}).items()
    return all(labels.get(key) == value for key, value in pairs) and all(
        _fits(expression, labels) for expression in selector.get("matchExpressions", [])
    )


def _fits(expression: Object, labels: Mapping[str, str]) -> bool:
    value = labels.get(expression["key"])
    match expression["operator"]:
        case "In":
            return value in expression["values"]
        case "NotIn":
            return value not in expression["values"]
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case other:
            raise AssertionError(f"no such operator: {other}")


def _selects(policy: Object, target: Place) -> bool:
    spec = policy["spec"]
    _only(spec, "spec")
    here = policy["metadata"]["namespace"] == target.namespace
    return here and "Ingress" in spec["policyTypes"] and fits(spec["podSelector"], target.labels)


def _allows(rule: Object, namespace: str, source: Place, port: int) -> bool:
    """An absent list of peers or ports allows all of them, and so does an empty one."""
    _only(rule, "rule")
    peers, ports = rule.get("from") or [], rule.get("ports") or []
    return (not peers or any(_is_peer(peer, namespace, source) for peer in peers)) and (
        not ports or any(_is_port(rule_port, port) for rule_port in ports)
    )


def _is_peer(peer: Object, namespace: str, source: Place) -> bool:
    _only(peer, "peer")
    if source.host_network:
        return False
    if "namespaceSelector" not in peer:
        return source.namespace == namespace and fits(peer["podSelector"], source.labels)
    there = {"kubernetes.io/metadata.name": source.namespace}
    return fits(peer["namespaceSelector"], there) and fits(peer.get("podSelector", {}), source.labels)


def _is_port(rule_port: Object, port: int) -> bool:
    _only(rule_port, "port")
    return bool(rule_port.get("protocol", "TCP") == "TCP" and rule_port.get("port", port) == port)


def _only(block: Object, kind: str) -> None:
    unknown: Sequence[str] = sorted(set(block) - KNOWN[kind])
    assert not unknown, f"{kind} holds {unknown}, which is not understood here"
