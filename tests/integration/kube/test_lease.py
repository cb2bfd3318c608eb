"""The lease on a real API server: never two holders, and never none for longer than a lease lasts."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import kube
import pytest
from kubernetes_asyncio.client import ApiClient, Configuration
from severable_proxy import SeverableProxy, proxy_to

from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi, connect
from megatronapp_operator.backends.kubernetes.client.errors import LeaseLostError
from megatronapp_operator.backends.kubernetes.client.resources import LEASES
from megatronapp_operator.backends.kubernetes.lease import LeaseHolder, LeaseSettings, boot_s

pytestmark = pytest.mark.asyncio
BRISK = LeaseSettings(duration_s=3.0, renew_deadline_s=2.0, retry_s=0.1)
LONG = LeaseSettings(duration_s=900.0, renew_deadline_s=800.0, retry_s=0.1)
"""For tests in which no lease runs out, however late a process is."""
PATIENCE_S = 240


@contextlib.asynccontextmanager
async def opened(plane: kube.ControlPlane) -> AsyncIterator[KubernetesApi]:
    async with connect(kubeconfig=str(plane.kubeconfig())) as api:
        yield api


@contextlib.asynccontextmanager
async def opened_over_a_wire(plane: kube.ControlPlane) -> AsyncIterator[tuple[KubernetesApi, SeverableProxy]]:
    async with proxy_to(int(plane.url.rsplit(":", 1)[1])) as (wire, port):
        settings = Configuration(host=f"https://127.0.0.1:{port}", api_key={"BearerToken": plane.tokens[kube.ADMIN]})
        settings.api_key_prefix = {"BearerToken": "Bearer"}
        settings.ssl_ca_cert = str(plane.certificate)
        async with ApiClient(configuration=settings) as client:
            yield KubernetesApi(client), wire


def candidate(
    api: KubernetesApi,
    namespace: str,
    identity: str,
    clock: Callable[[], float] = boot_s,
    settings: LeaseSettings = BRISK,
) -> LeaseHolder:
    return LeaseHolder(api, namespace=namespace, name="operator", identity=identity, settings=settings, clock=clock)


async def holder_of(api: KubernetesApi, namespace: str) -> tuple[str, int]:
    lease = await api.get(LEASES, namespace, "operator")
    assert lease is not None
    return lease["spec"]["holderIdentity"], lease["spec"]["leaseTransitions"]


async def renewed_at(api: KubernetesApi, namespace: str) -> str:
    lease = await api.get(LEASES, namespace, "operator")
    assert lease is not None
    renew_time: str = lease["spec"]["renewTime"]
    return renew_time


async def test_the_first_leads_and_a_release_lets_the_next_lead(plane: kube.ControlPlane, namespace: str) -> None:
    async with opened(plane) as api, asyncio.timeout(PATIENCE_S):
        first, second = (candidate(api, namespace, name, settings=LONG) for name in ("first", "second"))
        await first.acquire()
        waiting = asyncio.create_task(second.acquire())
        taken_at = await renewed_at(api, namespace)
        renewing = asyncio.create_task(first.hold())
        while await renewed_at(api, namespace) == taken_at:
            await asyncio.sleep(LONG.retry_s)
        assert await holder_of(api, namespace) == ("first", 1)
        renewing.cancel()
        await asyncio.wait([renewing])
        assert [first.is_leader, second.is_leader] == [True, False]
        await first.release()
        assert [first.is_leader, second.is_leader] == [False, False]
        await waiting
        assert second.is_leader
        assert await holder_of(api, namespace) == ("second", 2)


@pytest.mark.full("waits for two leases")
async def test_a_holder_that_renews_keeps_it_longer_than_a_lease_lasts(
    plane: kube.ControlPlane, namespace: str
) -> None:
    """After each renewal half a second passes by the clock of both: the next one may have begun before."""
    now_s = 0.0
    async with opened(plane) as api, asyncio.timeout(PATIENCE_S):
        first, second = (candidate(api, namespace, name, lambda: now_s) for name in ("first", "second"))
        await first.acquire()
        renewing, waiting = asyncio.create_task(first.hold()), asyncio.create_task(second.acquire())
        while now_s < 3 * BRISK.duration_s:
            before = await renewed_at(api, namespace)
            while await renewed_at(api, namespace) == before:
                await asyncio.sleep(BRISK.retry_s)
            now_s += 0.5
        assert first.is_leader
        assert not renewing.done() and not waiting.done()
        assert await holder_of(api, namespace) == ("first", 1)
        for task in (renewing, waiting):
            task.cancel()


@pytest.mark.full("waits for a lease, as that of a holder that is cut off")
async def test_after_a_holder_that_died_the_next_candidate_waits_a_whole_lease(
    plane: kube.ControlPlane, namespace: str
) -> None:
    async with opened(plane) as api, asyncio.timeout(PATIENCE_S):
        await candidate(api, namespace, "dead").acquire()
        began, second = time.monotonic(), candidate(api, namespace, "second")
        await second.acquire()
        assert time.monotonic() - began >= BRISK.duration_s - BRISK.retry_s
        assert await holder_of(api, namespace) == ("second", 2)


async def test_a_disconnected_holder_stops_before_another_candidate_leads(
    plane: kube.ControlPlane, namespace: str
) -> None:
    async with opened(plane) as api, opened_over_a_wire(plane) as (far, wire), asyncio.timeout(PATIENCE_S):
        first, second = candidate(far, namespace, "first"), candidate(api, namespace, "second")
        await first.acquire()

        async def followed() -> None:
            await second.acquire()
            assert not first.is_leader, "nobody leads while the one who is cut off might still believe it does"

        renewing, waiting = asyncio.create_task(first.hold()), asyncio.create_task(followed())
        wire.sever()
        with pytest.raises(LeaseLostError, match="first no longer leads"):
            await renewing
        assert not first.is_leader
        await waiting
        wire.join()  # its earlier requests arrive late, and must change nothing
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(first.acquire(), 1)
        assert await holder_of(api, namespace) == ("second", 2)


async def test_who_slept_through_its_lease_knows_it_before_it_acts(plane: kube.ControlPlane, namespace: str) -> None:
    """A process that was stopped, or a machine that slept: the clock went on."""
    asleep_s = 0.0
    async with opened(plane) as api, asyncio.timeout(PATIENCE_S):
        sleeper = candidate(api, namespace, "sleeper", lambda: time.monotonic() + asleep_s)
        await sleeper.acquire()
        asleep_s = BRISK.renew_deadline_s
        assert not sleeper.is_leader
        with pytest.raises(LeaseLostError):  # although no other holder has taken it yet
            await sleeper.hold()
        await candidate(api, namespace, "other", lambda: 10 * time.monotonic()).acquire()
        assert await holder_of(api, namespace) == ("other", 2)


async def test_exactly_a_single_candidate_of_many_leads(plane: kube.ControlPlane, namespace: str) -> None:
    async with opened(plane) as api, asyncio.timeout(PATIENCE_S):
        crowd = [candidate(api, namespace, f"candidate-{number}", settings=LONG) for number in range(8)]
        for index in range(len(crowd)):
            waiting = {
                asyncio.create_task(candidate_of_task.acquire()): candidate_of_task for candidate_of_task in crowd
            }
            done, others = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in others:
                task.cancel()
            (winner,) = [waiting[task] for task in done]
            assert [holder for holder in crowd if holder.is_leader] == [winner]
            assert (await holder_of(api, namespace))[1] == index + 1
            await winner.release()
            crowd.remove(winner)


@pytest.mark.parametrize("wrong", [{"duration_s": 5.0}, {"retry_s": 20.0}, {"retry_s": 0.0}])
async def test_times_that_would_let_two_lead_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="duration_s > renew_deadline_s > retry_s > 0"):
        LeaseSettings(**wrong)
