"""Merge of a part of a pod into a pod, as `kubectl patch --type strategic` does for the lists that pods have.

Maps are merged key by key, a value of None removes its key, and an item of a list with a key is merged into the item of
the same key. All other lists are replaced.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megatronapp_operator.backends.kubernetes.client.resources import Object

DEEP = {"containers": ("name",), "initContainers": ("name",)}
"""Lists whose items are merged field by field, and the fields that identify an item."""
WHOLE = {
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ports": ("containerPort", "protocol"),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
    "resourceClaims": ("name",),
    "claims": ("name", "request"),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}
"""Lists whose items replace those with the same key: two halves of different volumes make no volume."""
JOINED = frozenset({"tolerations", "envFrom", "schedulingGates"})
"""Lists without a key, to which new items are added."""


def merge(base: Mapping[str, Any], patch: Mapping[str, Any]) -> Object:
    """Return `base` merged with `patch`; neither is changed."""
    merged: Object = dict(base)
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _value(name, merged.get(name), value)
    return merged


def _value(name: str, old: Any, new: Any) -> Any:  # noqa: ANN401
    if isinstance(new, Mapping):
        return merge(old if isinstance(old, Mapping) else {}, new)
    if not isinstance(new, list | tuple) or not isinstance(old, list | tuple):
        return _plain(name, new)
    if name in DEEP or name in WHOLE:
        return _by_key(name, old, new)
    if name in JOINED:
        return [*old, *(item for item in new if item not in old)]
    return list(new)


def _plain(name: str, new: Any) -> Any:  # noqa: ANN401
    """Copy a new value; a new list may still have marks for removal in its items."""
    if name in DEEP and isinstance(new, list | tuple):
        return _by_key(name, [], new)
    return list(new) if isinstance(new, tuple) else new


def _by_key(name: str, old: Sequence[Any], new: Sequence[Any]) -> list[Any]:
    keys = DEEP.get(name) or WHOLE[name]
    items = {_key(item, keys): item for item in old}
    for item in new:
        key = _key(item, keys)
        items[key] = merge(items.get(key, {}) if name in DEEP else {}, item)
    return list(items.values())


def _key(item: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the values that identify an item; `protocol` has a default."""
    return tuple(item.get(key, "TCP" if key == "protocol" else None) for key in keys)
