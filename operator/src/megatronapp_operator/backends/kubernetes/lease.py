"""Leader election by a coordination.k8s.io Lease: at most one holder at a time, as far as clocks run at the same speed.

The rules are those of Kubernetes' own components (client-go's leaderelection): no process trusts the wall clock of
another node. A candidate takes the lease once it has seen no renewal for `duration_s` by its own clock; the holder
stops once it could not renew for `renew_deadline_s`, counted from before the request was sent, and that is shorter. The
clock continues while a process or a node sleeps. The election of kubernetes_asyncio trusts the wall clock, ends with an
exception when the server cannot be reached, and leaves its tasks running then.
"""

import asyncio
import dataclasses
import datetime
import logging
import time
from collections.abc import Callable

from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi
from megatronapp_operator.backends.kubernetes.client.errors import ApiError, ConflictError, LeaseLostError
from megatronapp_operator.backends.kubernetes.client.resources import LEASES, Object

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LeaseSettings:
    """Times in seconds; the defaults are those of Kubernetes' components."""

    duration_s: float = 15.0
    renew_deadline_s: float = 10.0
    retry_s: float = 2.0

    def __post_init__(self) -> None:
        if not self.duration_s > self.renew_deadline_s > self.retry_s > 0:
            raise ValueError("a lease needs duration_s > renew_deadline_s > retry_s > 0")


def boot_s() -> float:
    """Return the seconds since the node started, with its sleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseHolder:
    """One candidate of the election.

    Use: `await acquire()`, then `await hold()` in parallel with the work; check `is_leader` before every write.
    """

    def __init__(
        self,
        api: KubernetesApi,
        *,
        namespace: str,
        name: str,
        identity: str,
        settings: LeaseSettings | None = None,
        clock: Callable[[], float] = boot_s,
    ) -> None:
        self._api = api
        self._namespace, self._name, self._identity = namespace, name, identity
        self._settings = settings or LeaseSettings()
        self._clock = clock
        self._renewed_at = float("-inf")
        self._seen: tuple[str, float] = ("", 0.0)
        """Newest resourceVersion of another's lease, and when it was first seen."""
        self._expires_at = float("-inf")
        """When another's lease may be taken, unless it is renewed."""
        self._problem = ""
        """Newest error of the API server, which is logged once."""

    @property
    def is_leader(self) -> bool:
        """True if the lease is surely ours at this moment."""
        return self._clock() < self._renewed_at + self._settings.renew_deadline_s

    async def acquire(self) -> None:
        """Wait until the lease is ours."""
        while not await self._try():
            await asyncio.sleep(self._pause_s())

    async def hold(self) -> None:
        """Renew until the lease may be lost, then raise LeaseLostError.

        A late renewal is a loss even if no other process has taken the lease: work was not guarded meanwhile.
        """
        while self.is_leader:
            await asyncio.sleep(self._settings.retry_s)
            if self.is_leader:
                await self._try()
        self._renewed_at = float("-inf")
        lease = f"{self._namespace}/{self._name}"
        raise LeaseLostError(f"the lease {lease} is lost; {self._identity} no longer leads")

    async def release(self) -> None:
        """Release the lease if it is ours, so that another candidate leads at once; an error only makes it wait."""
        self._renewed_at = float("-inf")
        try:
            lease = await self._api.get(LEASES, self._namespace, self._name)
            if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
                await self._api.replace(LEASES, self._written(lease, holder=""))
        except ApiError:
            return

    async def _try(self) -> bool:
        """Try once to take or renew the lease; return True if that succeeded."""
        began = self._clock()
        try:
            lease = await self._api.get(LEASES, self._namespace, self._name, timeout_s=self._patience_s())
            if lease is None:
                await self._api.create(LEASES, self._fresh())
            elif self._may_take(lease):
                await self._api.replace(LEASES, self._written(lease), timeout_s=self._patience_s())
            else:
                self._renewed_at = float("-inf")  # another process holds it
                return False
        except ConflictError:  # another candidate was faster
            return False
        except ApiError as error:
            if str(error) != self._problem:
                log.warning("the lease %s/%s cannot be taken or renewed: %s", self._namespace, self._name, error)
            self._problem = str(error)
            return False
        self._problem = ""
        self._renewed_at = began
        return True

    def _patience_s(self) -> float:
        """Return the seconds for a request, which must not keep a holder from noticing that its time is over."""
        left = self._renewed_at + self._settings.renew_deadline_s - self._clock()
        return left if left > 0 else self._settings.renew_deadline_s

    def _pause_s(self) -> float:
        """Return the seconds until the next attempt: no longer than until the time of the lease's holder is over."""
        left = self._expires_at - self._clock()
        return min(self._settings.retry_s, left) if left > 0 else self._settings.retry_s

    def _may_take(self, lease: Object) -> bool:
        holder = (lease.get("spec") or {}).get("holderIdentity")
        if not holder or holder == self._identity:
            return True
        version, now = lease["metadata"]["resourceVersion"], self._clock()
        if version != self._seen[0]:
            self._seen = (version, now)
        duration_s = max(lease["spec"].get("leaseDurationSeconds") or 0, self._settings.duration_s)
        self._expires_at = self._seen[1] + duration_s
        return now >= self._expires_at

    def _fresh(self) -> Object:
        metadata = {"name": self._name, "namespace": self._namespace}
        empty = {"apiVersion": LEASES.api_version, "kind": "Lease", "metadata": metadata, "spec": {}}
        return self._written(empty)

    def _written(self, lease: Object, *, holder: str | None = None) -> Object:
        """Return the lease with a new renewal; a new holder is a transition."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        spec, new_holder = dict(lease.get("spec") or {}), self._identity if holder is None else holder
        if spec.get("holderIdentity") != new_holder:
            begins = {"acquireTime": now, "leaseTransitions": (spec.get("leaseTransitions") or 0) + 1}
            spec |= begins if new_holder else {}
        duration_s = max(1, round(self._settings.duration_s))
        spec |= {"holderIdentity": new_holder, "renewTime": now, "leaseDurationSeconds": duration_s}
        return lease | {"spec": spec}
