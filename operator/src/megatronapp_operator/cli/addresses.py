"""Addresses of a job's hub and API, with the tokens that open them."""

import urllib.parse

import httpx

from megatronapp_common.web.tokens import TokenRole, derive_token, read_secret
from megatronapp_operator.backends.process.state import files
from megatronapp_operator.backends.process.state.paths import JobPaths
from megatronapp_operator.errors import HubError, OperatorError

TIMEOUT_S = 30.0
"""Seconds for an answer of the hub, which runs on this machine and may wait for a processor."""


def hub_access(paths: JobPaths) -> tuple[str, str]:
    """Return the address of the hub and the viewer's token. Raises HubError if the job has no hub now."""
    hub = files.read_json(paths.hub)
    if hub is None:
        raise HubError(
            f"{paths.name}: no hub is running; it needs spec.analyzer.enabled: true, and ends with the job "
            "(after spec.analyzer.retainSeconds); what it stored can still be read by `megatronapp trace export`"
        )
    return hub["url"], derive_token(read_secret(paths.secret), TokenRole.VIEWER)


def controller_access(paths: JobPaths) -> tuple[str, str]:
    """Return address and token of the job's hub for its owner, who may control it. Raises OperatorError as above."""
    url, _ = hub_access(paths)
    return url, derive_token(read_secret(paths.secret), TokenRole.CONTROLLER)


def api_access(paths: JobPaths) -> tuple[str, str]:
    """Return address and key of the API of a served model. Raises OperatorError if the job serves nothing now."""
    api = files.read_json(paths.serve)
    if api is None:
        raise OperatorError(f"{paths.name}: no model is served; it needs spec.mode: serve, and ends with the job")
    return api["url"], derive_token(read_secret(paths.secret), TokenRole.SERVE)


def page_address(paths: JobPaths, *, mode: str | None) -> str:
    """Return an address that logs a browser in once, within a minute, at the page of a job.

    `mode` is spec.mode and selects the page. Raises HubError.
    """
    url, _ = hub_access(paths)
    return login_address(url, paths, mode=mode)


def login_address(url: str, paths: JobPaths, *, mode: str | None) -> str:
    """Return an address that logs a browser in once at the hub with address `url`. Raises HubError."""
    token = derive_token(read_secret(paths.secret), TokenRole.CONTROLLER)  # it is their own job
    try:
        with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
            answer = client.post(f"{url}/api/v1/codes", headers={"Authorization": f"Bearer {token}"})
        return f"{url}/{page_query(mode)}#code={answer.raise_for_status().json()['code']}"
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise HubError(
            f"{url}: the hub did not return a login code: {error}; see hub.log in the job's state folder"
        ) from error


def page_query(mode: str | None, **selected: str) -> str:
    """Return the query string of a job's start page; for a job that serves this is its model."""
    query = selected | ({"page": "scope"} if mode == "serve" else {})
    return f"?{urllib.parse.urlencode(query)}" if query else ""
