"""Writing of Events about jobs, for their users."""

import datetime
import logging
import secrets

from megatronapp_common.names import API_VERSION, KIND
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi
from megatronapp_operator.backends.kubernetes.client.errors import ApiError, NamespaceTerminatingError
from megatronapp_operator.backends.kubernetes.client.resources import EVENTS, Object
from megatronapp_operator.backends.kubernetes.render.settings import JobOwner
from megatronapp_operator.plan import RecordEvent

log = logging.getLogger(__name__)

MAX_NOTE = 1024
"""Most bytes of the text of an Event (events.k8s.io/v1)."""
MAX_INSTANCE = 128
"""Most characters of the name of the reporting process."""


class EventWriter:
    """Writer of Events about jobs."""

    def __init__(self, api: KubernetesApi, identity: str) -> None:
        self._api = api
        self._identity = identity

    async def record(self, owner: JobOwner, event: RecordEvent) -> None:
        """Write an Event for users; if that fails, only log it."""
        try:
            await self._api.create(EVENTS, _event(owner, event, self._identity))
        except NamespaceTerminatingError:
            return
        except ApiError as error:
            log.warning("%s/%s: writing an Event failed: %s", owner.namespace, owner.name, error)


def _event(owner: JobOwner, event: RecordEvent, identity: str) -> Object:
    now = datetime.datetime.now(datetime.UTC)
    name = {"namespace": owner.namespace, "name": owner.name}
    return {
        "apiVersion": EVENTS.api_version,
        "kind": "Event",
        "metadata": {"namespace": owner.namespace, "name": f"{owner.name}.{secrets.token_hex(8)}"},
        "eventTime": now.isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "reportingController": "megatronapp.io/operator",
        "reportingInstance": identity[:MAX_INSTANCE],
        "action": event.reason,
        "reason": event.reason,
        "type": event.type.value,
        "note": event.message.encode("utf-8", "replace")[:MAX_NOTE].decode("utf-8", "ignore"),
        "regarding": {"apiVersion": API_VERSION, "kind": KIND, "uid": owner.uid} | name,
    }
