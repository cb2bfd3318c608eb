"""From the command line to a leading operator, and its end.

A process that loses the lease ends at once by its exit code: its memory of jobs belongs to another leader now.
"""

import asyncio
import dataclasses
import gc
import logging
import signal
import sys
from collections.abc import Callable, Sequence

import httpx
from prometheus_client import CollectorRegistry

from megatronapp_common import __version__
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi, connect
from megatronapp_operator.backends.kubernetes.client.errors import LeaseLostError
from megatronapp_operator.backends.kubernetes.lease import LeaseHolder
from megatronapp_operator.controller.capabilities import find_pod_groups, has_container_restarts, has_resource_claims
from megatronapp_operator.controller.clock import ServerClock
from megatronapp_operator.controller.probes import create_app, create_server, run_server
from megatronapp_operator.controller.service import ControllerHealth, LeaderService, describe_namespaces
from megatronapp_operator.controller.settings import ControllerSettings, parse
from megatronapp_operator.controller.watches import Watches
from megatronapp_operator.errors import BackendError, SettingsError
from megatronapp_operator.metrics import OperatorMetrics

log = logging.getLogger(__name__)

USAGE, LOST, FAILED = 2, 3, 1
"""Exit codes: invalid settings, lost lease, any other failure."""
WATCH_CHECK_S = 1.0
"""Seconds between checks that the watches run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until a signal (0), the loss of the lease (3) or a failure (1); return 2 for invalid settings."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s operator %(levelname)s %(message)s")
    for name in ("httpx", "kopf", "uvicorn"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        settings = parse(arguments)
    except SettingsError as error:
        print(f"operator: {error}", file=sys.stderr)
        return USAGE
    gc.collect()
    gc.freeze()  # imported objects are never freed: watches of large gangs would have them searched again and again
    return asyncio.run(_until_signal(settings))


async def _until_signal(settings: ControllerSettings) -> int:
    task = asyncio.create_task(operate(settings))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return 0
    except LeaseLostError as error:
        log.error("%s", error)
        return LOST
    except Exception:
        log.exception("the operator failed")
    return FAILED


async def operate(settings: ControllerSettings) -> None:
    """Wait for the lease, then lead. Raises LeaseLostError when it is lost, BackendError when the watches end."""
    registry, health = CollectorRegistry(), ControllerHealth()
    metrics = OperatorMetrics(registry, version=__version__)
    # The lease must not wait for a connection: each namespace's watch holds one, and `at_once` limits other requests.
    async with connect(kubeconfig=settings.kubeconfig, connections=0) as api:
        lease = LeaseHolder(
            api, namespace=settings.lease_namespace, name=settings.lease_name, identity=settings.identity
        )
        app = create_app(registry, alive=health.stuck, ready=lambda: _not_ready(health))
        async with run_server(create_server(app), settings.port):
            log.info("waiting for the lease %s/%s", settings.lease_namespace, settings.lease_name)
            await lease.acquire()
            try:
                await _lead(api, lease, settings, metrics, health)
            except BaseExceptionGroup as group:
                raise _loss(group) or group from None
            finally:
                metrics.leader(False)
                await asyncio.shield(lease.release())


async def _lead(
    api: KubernetesApi,
    lease: LeaseHolder,
    settings: ControllerSettings,
    metrics: OperatorMetrics,
    health: ControllerHealth,
) -> None:
    log.info("leading as %s; watching %s", settings.identity, describe_namespaces(settings.namespaces))
    metrics.leader(True)
    settings.keys.reload()  # they may have been rotated while this process waited for the lease
    health.leads = True
    async with asyncio.TaskGroup() as group:
        group.create_task(lease.hold())  # before any question: an answer may take longer than the lease lasts
        await _serve(api, lease, await _with_capabilities(api, settings), metrics, health)


async def _with_capabilities(api: KubernetesApi, settings: ControllerSettings) -> ControllerSettings:
    place = settings.namespaces[0] if settings.namespaces else settings.render.operator_namespace
    found = dataclasses.replace(
        settings.render,
        container_restarts=await has_container_restarts(api, place),
        pod_groups=await find_pod_groups(api),
        resource_claims=await has_resource_claims(api),
    )
    return dataclasses.replace(settings, render=found)


async def _serve(
    api: KubernetesApi,
    lease: LeaseHolder,
    settings: ControllerSettings,
    metrics: OperatorMetrics,
    health: ControllerHealth,
) -> None:
    clock = ServerClock()
    guarded = api.guarded(
        _guard(lease),
        metrics.request,
        dated=clock.observe_date,
        at_once=settings.concurrency,
    )
    async with httpx.AsyncClient(trust_env=False) as client:
        service = LeaderService(guarded, client, settings, metrics, health, clock=clock)
        watches = Watches(settings.kubeconfig, settings.namespaces, service.on_watch_event)
        try:
            async with asyncio.TaskGroup() as group:
                await service.begin()  # before the watches list the same again: urgent jobs are first
                watches.start(asyncio.get_running_loop(), profiles=service.readable_profiles)
                health.turned_at = lambda: watches.turned_at
                group.create_task(_watched(watches))
                group.create_task(settings.keys.follow())
                group.create_task(service.run())
        finally:
            await asyncio.to_thread(watches.stop)


def _guard(lease: LeaseHolder) -> Callable[[], None]:
    def guard() -> None:
        if not lease.is_leader:
            raise LeaseLostError("the lease may have been lost: nothing is changed")

    return guard


async def _watched(watches: Watches) -> None:
    """Raise BackendError once the watches have ended: an operator without them must be restarted."""
    while watches.alive:
        await asyncio.sleep(WATCH_CHECK_S)
    raise BackendError(f"the watches have ended: {watches.error or 'no reason given'}")


def _loss(group: BaseExceptionGroup[BaseException]) -> LeaseLostError | None:
    """Return the loss of the lease among the errors that ended all tasks together, or None."""
    for error in group.exceptions:
        found = _loss(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, LeaseLostError):
            return found
    return None


def _not_ready(health: ControllerHealth) -> str | None:
    """Return why the replica is not ready.

    One that waits for the lease is ready; the leader must have listed all objects.
    """
    return "listing all objects" if health.leads and not health.synced else None
