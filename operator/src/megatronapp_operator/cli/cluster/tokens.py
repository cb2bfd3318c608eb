"""Selection of a token for the gateway, so that no user has to paste one.

Tried in this order: the token of the kubeconfig; the account of --service-account instead; the job's own token, if the
caller may read its Secret; the viewer account that the chart creates. A token requested for the gateway has the
gateway's audience, so that no other service accepts it, and expires after eight hours.
"""

import base64
import contextlib
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from http import HTTPStatus

from megatronapp_common.job import read_status
from megatronapp_common.job.api.metadata import NAME_PATTERN
from megatronapp_common.names import GATEWAY_AUDIENCE, LABEL_JOB_UID
from megatronapp_common.text.terminal import replace_control_characters
from megatronapp_common.web.tokens import TokenRole, derive_token
from megatronapp_operator.backends.kubernetes.client.errors import ApiError
from megatronapp_operator.backends.kubernetes.client.resources import SECRETS, Object, Resource
from megatronapp_operator.backends.kubernetes.render import ObjectNames
from megatronapp_operator.cli.cluster import gateway_client
from megatronapp_operator.cli.cluster.connection import Cluster, ClusterJob
from megatronapp_operator.cli.cluster.gateway_client import GatewayEndpoint
from megatronapp_operator.cli.inject import problem_of
from megatronapp_operator.errors import HubError, OperatorError

ACCOUNTS = Resource("v1", "serviceaccounts")
LIFE_S = 8 * 3600
"""Seconds until a requested token expires: a working day."""
VIEWER = "viewer"
"""Suffix of the chart's viewer account, after the name of the gateway's Service."""
NO_TOKEN = (
    "your kubeconfig has no token (most likely a client certificate), and the gateway accepts only tokens; name a "
    "service account that may see the jobs and whose tokens you may create by --service-account NAMESPACE/NAME"
)


@dataclasses.dataclass(frozen=True, slots=True)
class SelectedToken:
    """Token, and the owner of its rights if that is not the caller."""

    token: str
    whose: str | None = None


def _print_note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def token_for(
    cluster: Cluster,
    gateway: GatewayEndpoint,
    job: ClusterJob | None,
    *,
    report: Callable[[str], None] = _print_note,
) -> str:
    """Return a token that the gateway accepts, and report whose rights it has if they are not the caller's own.

    Raises HubError with the gateway's message, OperatorError for a wrong account.
    """
    path = "/api/v1/jobs" if job is None else f"/api/v1/jobs/{job.namespace}/{job.name}"
    refusal = NO_TOKEN + ("" if job is not None else ", or name a job whose Secret you may read")
    for shown in _tokens(cluster, gateway, job):
        answer = gateway_client.call_gateway(gateway, "GET", path, token=shown.token)
        if answer.is_success:
            if shown.whose is not None:
                report(f"with the rights of {shown.whose}")
            return shown.token
        refusal = replace_control_characters(problem_of(answer))
        if answer.status_code not in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            break
    raise HubError(f"the gateway denies access: {refusal}")


def _tokens(cluster: Cluster, gateway: GatewayEndpoint, job: ClusterJob | None) -> Iterator[SelectedToken]:
    if cluster.selection.service_account:
        yield _of_account(cluster, *_account(cluster, cluster.selection.service_account))
        return
    own = cluster.bearer()
    if own is not None:
        yield SelectedToken(own)
    if job is not None:
        with contextlib.suppress(ApiError):  # few may read Secrets
            yield from _of_job(cluster, job)
    if own is None and gateway.service is not None:
        place = gateway.service["metadata"]
        with contextlib.suppress(ApiError):  # nor make tokens of others
            yield _of_account(cluster, place["namespace"], f"{place['name']}-{VIEWER}")


def _of_job(cluster: Cluster, job: ClusterJob) -> Iterator[SelectedToken]:
    for secret in _secrets(cluster, job):
        text = base64.b64decode(secret["data"]["secret"]).decode("ascii").strip()
        place = f"job {job.namespace}/{job.name}"
        yield SelectedToken(derive_token(text, TokenRole.CONTROLLER), f"who has the token of {place}")
        yield SelectedToken(
            derive_token(text, TokenRole.VIEWER), f"who has the viewer's token of {place}"
        )  # all that an older gateway knows


def _secrets(cluster: Cluster, job: ClusterJob) -> list[Object]:
    """Return the job's Secret, whose name has the key of the attempt; before the first attempt all Secrets of the job.

    Raises ApiError.
    """
    pinned = read_status(job.status).pinned
    if pinned is not None:
        name = ObjectNames(job.name).secret(job.uid, pinned.key_id)
        found = cluster.get(SECRETS, job.namespace, name)
        return [] if found is None else [found]
    listing = cluster.list_objects(SECRETS, job.namespace, labelSelector=f"{LABEL_JOB_UID}={job.uid}")
    return sorted(listing, key=lambda secret: str(secret["metadata"]["creationTimestamp"]), reverse=True)


def _of_account(cluster: Cluster, namespace: str, name: str) -> SelectedToken:
    """Request a token of a service account for the gateway alone. Raises ApiError."""
    body = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"audiences": [GATEWAY_AUDIENCE], "expirationSeconds": LIFE_S},
    }
    made = cluster.request("POST", ACCOUNTS.path(namespace, name, "token"), body=body)
    return SelectedToken(str(made["status"]["token"]), f"service account {namespace}/{name}")


def _account(cluster: Cluster, words: str) -> tuple[str, str]:
    """Parse [NAMESPACE/]NAME of a service account. Raises OperatorError."""
    namespace, slash, name = words.rpartition("/")
    place = (namespace if slash else cluster.namespace, name)
    if not all(re.fullmatch(NAME_PATTERN, part) for part in place):
        raise OperatorError(f"--service-account {words}: write NAME or NAMESPACE/NAME of a service account")
    return place
