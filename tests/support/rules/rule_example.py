"""One right manifest, and what an example of a rule is: a change to it."""

import copy
import dataclasses
from typing import Any

BASE: dict[str, Any] = {
    "apiVersion": "megatronapp.io/v1alpha1",
    "kind": "MegatronJob",
    "metadata": {"name": "small"},
    "spec": {
        "nodes": 2,
        "procPerNode": 4,
        "parallelism": {"tensor": 2, "pipeline": 2},
        "model": {"numLayers": 4, "hiddenSize": 64, "numAttentionHeads": 4, "seqLength": 32, "vocabSize": 64},
        "training": {"microBatchSize": 1, "globalBatchSize": 8, "trainIters": 100, "lr": 0.001},
        "data": {"path": ["corpus"]},
        "trace": {"enabled": True},
    },
}
Changes = dict[str, Any]
"""Dotted paths in the manifest to new values; None takes a field out."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One manifest, or for a rule about changes two."""

    rule_id: str
    good: bool
    change: Changes
    field: str = ""
    """Path of the field that is refused in a bad one."""
    message: str = ""
    """A piece of what is said then."""
    server_message: str = ""
    """Message of an API server where its schema refuses the manifest, not a rule (`Rule.in_schema`)."""
    old: Changes | None = None
    """Changes that make BASE the manifest before, for a rule about changes; None for others."""


def manifest(example: Example) -> dict[str, Any]:
    """The manifest to judge."""
    return changed(example.change)


def old_manifest(example: Example) -> dict[str, Any] | None:
    """The manifest that it replaces; None where the rule is not about a change."""
    return None if example.old is None else changed(example.old)


def changed(changes: Changes) -> dict[str, Any]:
    """Return BASE with changes."""
    document = copy.deepcopy(BASE)
    for path, value in changes.items():
        *parents, name = path.split(".")
        block = document
        for parent in parents:
            block = block.setdefault(parent, {})
        if value is None:
            block.pop(name, None)
        else:
            block[name] = copy.deepcopy(value)
    return document


def good(rule_id: str, *changes: Changes) -> list[Example]:
    return [Example(rule_id=rule_id, good=True, change=change) for change in changes]


def bad(rule_id: str, field: str, *rows: tuple[Changes, str]) -> list[Example]:
    return [
        Example(rule_id=rule_id, good=False, change=change, field=field, message=message) for change, message in rows
    ]


def stays(
    rule_id: str, field: str, *, good: list[tuple[Changes, Changes]], bad: list[tuple[Changes, Changes, str]]
) -> list[Example]:
    return [
        *(Example(rule_id=rule_id, good=True, old=old, change=new) for old, new in good),
        *(
            Example(rule_id=rule_id, good=False, old=old, change=new, field=field, message=message)
            for old, new, message in bad
        ),
    ]
