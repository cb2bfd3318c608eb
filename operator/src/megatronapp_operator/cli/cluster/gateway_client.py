"""Discovery of the gateway of a cluster, and a forwarded port to it."""

import contextlib
import dataclasses
import ipaddress
import re
import ssl
import sys
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import httpx

from megatronapp_common.job.api.metadata import NAME_PATTERN
from megatronapp_common.job.crd import PLURAL
from megatronapp_common.names import GROUP
from megatronapp_common.web import loopback
from megatronapp_common.web.origin import loopback_alias
from megatronapp_operator.backends.kubernetes.client.errors import ForbiddenError
from megatronapp_operator.backends.kubernetes.client.resources import SERVICES, Object, Resource
from megatronapp_operator.cli.cluster.connection import Cluster
from megatronapp_operator.cli.cluster.port_forward import ForwardedPort, forward_port
from megatronapp_operator.errors import HubError, OperatorError

LABEL_KEYS = ("app.kubernetes.io/component", "app.kubernetes.io/part-of")
LABELS = "app.kubernetes.io/component=gateway,app.kubernetes.io/part-of=megatronapp"
DEFINITIONS = Resource("apiextensions.k8s.io/v1", "customresourcedefinitions")
RELEASE_NAMESPACE, RELEASE_NAME = "meta.helm.sh/release-namespace", "meta.helm.sh/release-name"
"""Annotations that Helm writes."""
USUAL_NAME = "megatronapp"
"""Name of the gateway's Service if the release does not determine it."""
TIMEOUT_S = 15.0
"""Seconds for an answer of the gateway, which may have to query the API server first."""
_HOW = "name it by --gateway NAMESPACE/SERVICE, or by --gateway URL if an Ingress leads to it"


@dataclasses.dataclass(frozen=True, slots=True)
class GatewayEndpoint:
    """Address at which the gateway can be reached."""

    url: str
    forward: ForwardedPort | None = None
    service: Object | None = None
    """Service of the gateway; None if `--gateway` is a URL."""

    @property
    def page(self) -> str:
        """Address for a browser; for a forwarded port it has a fresh name, so that the cookie is sent to it alone.

        The name 127.0.0.1 shares its cookies with every other server of this machine, whichever port it has. For a port
        that another program forwards it is not known whether such a name leads to it alone.
        """
        if self.forward is None or not self.forward.named:
            return self.url
        return f"http://{loopback_alias(urllib.parse.urlsplit(self.url).netloc, 'gateway')}"


def _is_local_host(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextlib.contextmanager
def open_gateway(cluster: Cluster) -> Iterator[GatewayEndpoint]:
    """Yield the gateway while it is reachable: by a forwarded port, unless `--gateway` is a URL."""
    wanted = cluster.selection.gateway or ""
    if "://" in wanted:
        _warn_of_plain_text(wanted)
        yield GatewayEndpoint(wanted.rstrip("/"))
        return
    service = _service(cluster, wanted)
    with forward_port(cluster, service) as forward:
        yield GatewayEndpoint(f"http://{loopback.V4}:{forward.port}", forward, service)


def _warn_of_plain_text(url: str) -> None:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "https" and not _is_local_host(parts.hostname or ""):
        print(
            f"warning: --gateway {url}: anyone on the network path can read your token; use https://", file=sys.stderr
        )


def _service(cluster: Cluster, wanted: str) -> Object:
    """Return the gateway's Service: the one of `--gateway`, or the only one of the release.

    It receives the caller's token, and anyone with the right to write Services can write their labels. So the namespace
    is read from the CRD, which only administrators of the cluster write. Raises OperatorError.
    """
    if wanted:
        return _gateway_by_name(cluster, wanted)
    namespace, release = _release(cluster)
    try:
        found = cluster.list_objects(SERVICES, namespace, labelSelector=LABELS)
    except ForbiddenError as error:
        found = _default_gateway(cluster, namespace, (release, USUAL_NAME))
        if not found:
            raise OperatorError(_missing_rights_message(namespace)) from error
    if len(found) != 1:
        names = ", ".join(f"{service['metadata']['namespace']}/{service['metadata']['name']}" for service in found)
        what = (
            f"several gateways exist ({names})" if found else f"{namespace!r}, the release's namespace, has no gateway"
        )
        raise OperatorError(f"{what}; {_HOW}")
    return found[0]


def _default_gateway(cluster: Cluster, namespace: str, names: Iterable[str]) -> list[Object]:
    """Return the gateway by the names that the chart gives it, for users who may get one Service but not list all."""
    for name in dict.fromkeys(names):
        with contextlib.suppress(ForbiddenError):
            service = cluster.get(SERVICES, namespace, name)
            labels = (service or {}).get("metadata", {}).get("labels", {})
            if service is not None and ",".join(f"{key}={labels.get(key)}" for key in LABEL_KEYS) == LABELS:
                return [service]
    return []


def _missing_rights_message(namespace: str) -> str:
    return (
        f"you may not list the Services of {namespace!r}, where the gateway is; "
        f"request the rights that `gateway.users` of the chart gives, or {_HOW}"
    )


def _gateway_by_name(cluster: Cluster, wanted: str) -> Object:
    namespace, _, name = wanted.partition("/")
    if not re.fullmatch(NAME_PATTERN, namespace) or not re.fullmatch(NAME_PATTERN, name):
        raise OperatorError(f"--gateway {wanted}: write NAMESPACE/SERVICE; {_HOW}")
    service = cluster.get(SERVICES, namespace, name)
    if service is None:
        raise OperatorError(f"--gateway {wanted}: this Service does not exist; {_HOW}")
    return service


def _release(cluster: Cluster) -> tuple[str, str]:
    """Return namespace and name of the Helm release of the chart. Raises OperatorError if they are not known."""
    try:
        definition = cluster.get(DEFINITIONS, None, f"{PLURAL}.{GROUP}")
    except ForbiddenError as error:
        text = f"you may not read the CustomResourceDefinition {PLURAL}.{GROUP}, which names the gateway's namespace"
        raise OperatorError(f"{text}; request the rights that `gateway.users` of the chart gives, or {_HOW}") from error
    notes = (definition or {}).get("metadata", {}).get("annotations", {})
    namespace = notes.get(RELEASE_NAMESPACE)
    if not namespace:
        text = f"the CustomResourceDefinition {PLURAL}.{GROUP} has no annotation {RELEASE_NAMESPACE}"
        raise OperatorError(f"{text}, so the gateway's namespace is not known; {_HOW}")
    return str(namespace), str(notes.get(RELEASE_NAME, USUAL_NAME))


def call_gateway(
    gateway: GatewayEndpoint,
    method: str,
    path: str,
    *,
    token: str,
    json: Any = None,  # noqa: ANN401
    query: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> httpx.Response:
    """Send one request to the gateway. Raises HubError if it does not answer."""
    headers = {"Authorization": f"Bearer {token}"}
    try:
        with _http_client(gateway, timeout_s) as client:
            return client.request(method, f"{gateway.url}{path}", json=json, params=query, headers=headers)
    except httpx.HTTPError as error:
        raise HubError(f"{gateway.url}: the gateway does not answer: {error or type(error).__name__}") from error


def _http_client(gateway: GatewayEndpoint, timeout_s: float) -> httpx.Client:
    """Return a client; for a URL of `--gateway` with the system's certificates and the proxies of the environment."""
    parts = urllib.parse.urlsplit(gateway.url)
    is_remote = gateway.forward is None and not _is_local_host(parts.hostname or "")
    return httpx.Client(timeout=timeout_s, trust_env=is_remote, verify=parts.scheme != "https" or _certificates())


def _certificates() -> ssl.SSLContext | bool:
    """Return the system's certificates, or those of SSL_CERT_FILE; True, for those of httpx, if there are none."""
    paths = ssl.get_default_verify_paths()
    return ssl.create_default_context() if paths.cafile or paths.capath else True
