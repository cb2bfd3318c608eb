"""The official client of Kubernetes, typed: kubeconfig, credentials, requests. The other modules do not import it.

Its generated models are not used: they cost seconds of imports and do not know MegatronJobs.
"""

import contextlib
import json
import logging
import os
import pathlib
import ssl
import threading
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

import urllib3
import yaml
from urllib3.exceptions import HTTPError, InsecureRequestWarning
from urllib3.response import BaseHTTPResponse

from megatronapp_operator.backends.kubernetes.client.errors import UnavailableError, api_error_for
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.cli.cluster.daemon_thread import start_in_daemon_thread
from megatronapp_operator.errors import OperatorError

USER_AGENT = "megatronapp"
THREAD_END_S = 5.0
"""How much longer than a request its thread may wait for a server that sends nothing."""
DEFAULT_KUBECONFIG = "~/.kube/config"
POD_NAMESPACE = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""File in a pod with its namespace, next to the token of its service account."""
HOW_TO_NAME_ONE = "name one by --kubeconfig FILE and --context NAME"
NOT_INSTALLED = (
    "the Python package `kubernetes` is not installed, which the commands for a cluster need; "
    "run: pip install 'megatronapp-operator[cluster]'"
)


class OfficialClient:
    """Connection to the API server of a context, with the credentials of its user."""

    def __init__(self, kubeconfig: str | None, context: str | None) -> None:
        """Read the kubeconfig and get credentials. Raises OperatorError."""
        try:
            from kubernetes.client import ApiClient, Configuration
        except ImportError as error:
            raise OperatorError(NOT_INSTALLED) from error
        self.settings: Any = Configuration()
        self.settings.retries = False
        self.namespace = _load(self.settings, kubeconfig, context)
        if not self.settings.verify_ssl:  # by the kubeconfig, of which kubectl does not warn either
            urllib3.disable_warnings(InsecureRequestWarning)
        self._client: Any = ApiClient(configuration=self.settings)
        self._renewal = threading.Lock()

    def close(self) -> None:
        self._client.close()

    def authorization(self) -> str | None:
        """Return the value of the Authorization header, renewed if it has expired; None for a client certificate.

        Connections of a forwarded port call it at once; only one runs the credential plugin. Raises OperatorError.
        """
        with self._renewal, _unusable_credentials_raise():
            found: str | None = self.settings.get_api_key_with_prefix("BearerToken")
        return found

    def proxy(self) -> str | None:
        """Return the proxy of the kubeconfig, or that of the environment for this API server."""
        from kubernetes.client.rest import should_bypass_proxies

        proxy: str | None = self.settings.proxy
        return None if should_bypass_proxies(self.settings.host, self.settings.no_proxy or "") else proxy

    def tls(self) -> dict[str, Any]:
        """Return what `asyncio.open_connection` needs to know about TLS."""
        settings = self.settings
        if not settings.host.startswith("https:"):
            return {}
        context = ssl.create_default_context(cafile=settings.ssl_ca_cert)
        if settings.cert_file:
            context.load_cert_chain(settings.cert_file, settings.key_file)
        if not settings.verify_ssl:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return {"ssl": context} | ({"server_hostname": settings.tls_server_name} if settings.tls_server_name else {})

    def open(self, path: str, query: Mapping[str, str]) -> BaseHTTPResponse:
        """Begin to read a stream; return its answer, unread. Raises ApiError for any status but success."""
        return self._send("GET", path, headers=self._headers(), query=query)

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content: str = "application/json",
        limit_s: float,
    ) -> bytes:
        """Send one request and return the body of its answer, all of it in `limit_s`; credentials have no limit.

        Raises ApiError for any status but success.
        """
        headers = self._headers() | {"Content-Type": content}

        def send() -> bytes:
            # The package limits only the time without any byte; its limit ends the thread after the one below.
            idle_s = limit_s + THREAD_END_S
            answer = self._send(method, path, headers=headers, query=query, body=body, timeout_s=idle_s)
            with unavailable(f"{method} {path}"):
                return answer.data

        try:
            return start_in_daemon_thread(send).result(limit_s)
        except TimeoutError as error:
            raise UnavailableError(f"{method} {path}: no complete answer in {limit_s:g} s") from error

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json, */*", "User-Agent": USER_AGENT}
        if authorization := self.authorization():
            headers["Authorization"] = authorization
        return headers

    def _send(
        self,
        method: str,
        path: str,
        *,
        headers: dict[str, str],
        query: Mapping[str, str] | None,
        body: Object | None = None,
        timeout_s: float | None = None,
    ) -> BaseHTTPResponse:
        url = f"{self.settings.host}{path}" + (f"?{urlencode(query)}" if query else "")
        with unavailable(f"{method} {path}"):
            sent = self._client.call_api(method, url, headers, body, _request_timeout=timeout_s)
            answer: BaseHTTPResponse = sent.response
            if not HTTPStatus.OK <= answer.status < HTTPStatus.MULTIPLE_CHOICES:
                raise api_error_for(answer.status, parse_status(answer.data), f"{method} {path}")
        return answer


@contextlib.contextmanager
def unavailable(request: str) -> Iterator[None]:
    """Raise UnavailableError for a connection that fails or breaks."""
    from kubernetes.client.exceptions import ApiException

    try:
        yield
    except ApiException as error:  # of a certificate
        raise UnavailableError(f"{request}: {error.reason}") from error
    except (HTTPError, OSError) as error:
        raise UnavailableError(f"{request}: {error or type(error).__name__}") from error


def _load(settings: Any, kubeconfig: str | None, context: str | None) -> str:  # noqa: ANN401
    """Fill in the connection settings; return the namespace of the context. Raises OperatorError."""
    from kubernetes import config

    places = kubeconfig or os.environ.get("KUBECONFIG") or DEFAULT_KUBECONFIG
    with _unusable_credentials_raise():
        if not (kubeconfig or context or os.environ.get("KUBECONFIG")) and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=settings)
            return POD_NAMESPACE.read_text(encoding="utf-8").strip() if POD_NAMESPACE.exists() else "default"
        _require_file(places)
        config.load_kube_config(config_file=places, context=context, client_configuration=settings)
        contexts, active = config.list_kube_config_contexts(config_file=places)
    chosen = next((known for known in contexts if known["name"] == context), active)
    return str(chosen["context"].get("namespace") or "default")


def _require_file(places: str) -> None:
    """Check that a kubeconfig exists, because the library reports a missing one as invalid. Raises OperatorError."""
    if not any(place and pathlib.Path(place).expanduser().exists() for place in places.split(os.pathsep)):
        raise OperatorError(f"no cluster: {places} does not exist; {HOW_TO_NAME_ONE}")


@contextlib.contextmanager
def _unusable_credentials_raise() -> Iterator[None]:
    """Raise OperatorError for a kubeconfig without usable credentials.

    The library only logs that a credential plugin failed, or printed no credentials, and would send requests with the
    old ones or none.
    """
    from kubernetes.config import ConfigException

    thread, logged = threading.get_ident(), list[str]()
    handler = logging.Handler(logging.ERROR)
    handler.addFilter(lambda record: record.thread == thread)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield
    except (AttributeError, KeyError) as error:  # for one, google-auth is not installed
        problem = f"the credentials of the kubeconfig cannot be read ({type(error).__name__}: {error})"
        raise OperatorError(f"no cluster: {problem}; if its user has an auth-provider, replace it by exec") from error
    except (ConfigException, OSError, TypeError, ValueError, yaml.YAMLError) as error:
        raise OperatorError(f"no cluster: {error}; {HOW_TO_NAME_ONE}") from error
    finally:
        logging.getLogger().removeHandler(handler)
    if logged:
        raise OperatorError(f"no cluster: the kubeconfig's credential plugin failed: {'; '.join(logged)}")


def parse_status(body: bytes) -> Object:
    """Parse the Status object of a rejection; a proxy may answer with another body."""
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"message": body[:200].decode(errors="replace")}
