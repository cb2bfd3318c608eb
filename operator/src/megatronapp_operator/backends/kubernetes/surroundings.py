"""Services and NetworkPolicies of all jobs, listed at intervals: a job without deleted objects costs no request."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from megatronapp_common.names import LABEL_JOB_UID
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi
from megatronapp_operator.backends.kubernetes.client.resources import NETWORK_POLICIES, SERVICES, Object, Resource

LISTED = frozenset({SERVICES, NETWORK_POLICIES})
"""Kinds whose content the operator may read. ConfigMaps and Secrets it may only write."""
Place = tuple[Resource, str, str]
"""Kind, namespace and name of an object."""


class OwnedObjects:
    """Listed objects, by kind, namespace and name."""

    def __init__(self, found: Mapping[Place, Object], kinds: Collection[Resource] = LISTED) -> None:
        self._found = found
        self._kinds = kinds

    @staticmethod
    async def listed(
        api: KubernetesApi, namespaces: Sequence[str], kinds: Collection[Resource] = LISTED
    ) -> "OwnedObjects":
        """List the objects of these kinds in these namespaces, or in all. Raises ForbiddenError, ApiError."""
        found = dict[Place, Object]()
        for resource in kinds:
            for namespace in namespaces or (None,):
                for obj in (await api.list_objects(resource, namespace, labels=LABEL_JOB_UID)).items:
                    found[resource, obj["metadata"]["namespace"], obj["metadata"]["name"]] = obj
        return OwnedObjects(found, kinds)

    def find_differences(self, rendered: Iterable[tuple[Resource, Object]]) -> list[str]:
        """Return names of rendered objects that are missing or changed. Additions by other clients are ignored."""
        return [
            f"{resource.plural} {obj['metadata']['name']}"
            for resource, obj in rendered
            if resource in self._kinds and not _holds(obj, self._found.get(_place(resource, obj)))
        ]


def _place(resource: Resource, obj: Object) -> Place:
    return resource, obj["metadata"]["namespace"], obj["metadata"]["name"]


IMPLIED = frozenset({"apiVersion", "kind"})
"""Fields that items of a list do not have."""


def _holds(rendered: Any, found: Any) -> bool:  # noqa: ANN401 - parts of objects
    """Return True if `found` has all of `rendered`. The server omits empty values and adds defaults."""
    if isinstance(rendered, dict):
        fields = found if isinstance(found, dict) else dict[str, Any]()
        return all(_holds(value, fields.get(key)) for key, value in rendered.items() if key not in IMPLIED)
    if isinstance(rendered, list):
        items = found if isinstance(found, list) else []
        return len(rendered) == len(items) and all(map(_holds, rendered, items))
    return bool(rendered == found or (not rendered and found is None))
