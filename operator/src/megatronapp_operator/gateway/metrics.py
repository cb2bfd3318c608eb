"""Prometheus metrics of the gateway, served at a separate port to which no page links.

No label holds a name of a job, a namespace or a user, or other text of a caller or a hub.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatronapp_common.web.problems import HttpError

HUB_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
NO_ROUTE = "none"
"""Label of requests that match no route."""
OK = "ok"


class GatewayMetrics:
    """All metrics of one gateway process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "megatron_gateway_requests", "Requests by route and HTTP status.", ["route", "code"], registry=registry
        )
        self._refusals = Counter(
            "megatron_gateway_refusals",
            "Requests that the gateway refused, by error code; log-in: refused logins and unknown callers.",
            ["code"],
            registry=registry,
        )
        for code in ("log-in", "too-many"):
            self._refusals.labels(code)
        self._hubs = Histogram(
            "megatron_gateway_hub_seconds",
            "Time until a hub began to answer, by outcome: ok, or the error code of the answer.",
            ["outcome"],
            buckets=HUB_BUCKETS_S,
            registry=registry,
        )
        self._hubs.labels(OK)
        self._api = Counter(
            "megatron_gateway_api_requests",
            "Requests to the API server by verb, resource and code (error: no answer).",
            ["verb", "resource", "code"],
            registry=registry,
        )
        self._sockets = Gauge("megatron_gateway_sockets", "Live sockets that are open.", registry=registry)
        self._most = Gauge("megatron_gateway_sockets_limit", "How many live sockets may be open.", registry=registry)
        self._registry = registry
        ProcessCollector(namespace="megatron_gateway", registry=registry)

    def show_certificate(self, validity: Callable[[], tuple[float, float] | None]) -> None:
        """Add gauges of when the certificate of the TLS port begins and ends; NaN while that is not known.

        A gateway without TLS does not have them.
        """

        def edge(place: int) -> float:
            known = validity()
            return math.nan if known is None else known[place]

        for place, name, text in ((0, "not_before", "begins"), (1, "not_after", "ends")):
            gauge = Gauge(
                f"megatron_gateway_certificate_{name}_timestamp_seconds",
                f"When the certificate that is served over TLS {text} to be valid.",
                registry=self._registry,
            )
            gauge.set_function(functools.partial(edge, place))

    def count_sockets(self, count: Callable[[], int], most: int) -> None:
        """Set the gauges of open live sockets and of their limit."""
        self._sockets.set_function(count)
        self._most.set(most)

    def refused(self, refusal: HttpError) -> None:
        """The gateway did not do something."""
        self._refusals.labels(refusal.code).inc()

    def answered(self, route: str, status: int) -> None:
        """A request has its answer."""
        self._requests.labels(route, str(status)).inc()

    def count_api_request(self, verb: str, resource: str, code: str) -> None:
        """Count a request to the API server by the code of its answer ("error": none)."""
        self._api.labels(verb.lower(), resource, code).inc()

    @contextmanager
    def asking_hub(self) -> Iterator[None]:
        """Measure the time until the block ends, and count a HttpError that it raises."""
        began, outcome = time.perf_counter(), OK
        try:
            yield
        except HttpError as refusal:
            outcome = refusal.code
            raise
        finally:
            self._hubs.labels(outcome).observe(time.perf_counter() - began)


class RequestCounter:
    """ASGI layer that counts answers by the route that gave them."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.answered(route_of(scope), message["status"])
            await send(message)

        await self._app(scope, receive, send_counted)


def route_of(scope: Scope) -> str:
    """The pattern of the path, of which there are few."""
    return str(getattr(scope.get("route"), "path", NO_ROUTE))
