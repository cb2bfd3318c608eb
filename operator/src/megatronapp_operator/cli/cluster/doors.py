"""The way to the door of a cluster, and what opens it: nobody has to paste a token."""

import base64
import contextlib
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import httpx

from megatronapp_common.job.crd import PLURAL
from megatronapp_common.job.metadata import NAME_PATTERN
from megatronapp_common.names import DOOR_PORT, GROUP
from megatronapp_common.texts import plain
from megatronapp_common.tokens import Role, derive
from megatronapp_operator.backends.kubernetes.api import SECRETS, SERVICES, Object, Resource
from megatronapp_operator.backends.kubernetes.errors import ApiError, ForbiddenError
from megatronapp_operator.cli.cluster.connection import Cluster, ClusterJob
from megatronapp_operator.cli.inject import problem_of
from megatronapp_operator.errors import HubError, OperatorError

LABELS = "app.kubernetes.io/component=door,app.kubernetes.io/part-of=megatronapp"
DEFINITIONS = Resource("apiextensions.k8s.io/v1", "customresourcedefinitions")
RELEASE_NAMESPACE = "meta.helm.sh/release-namespace"
"""Annotation that helm writes."""
TIMEOUT_S = 15.0
AGAIN_S = 1.0
_HOW = "name it by --door NAMESPACE/SERVICE, or by --door URL where an Ingress leads to it"


class Forward:
    """`kubectl port-forward` to a Service; on a local port that stays the same when it has to begin again."""

    def __init__(self, cluster: Cluster, service: Object) -> None:
        program = shutil.which("kubectl")
        if program is None:
            raise OperatorError(f"kubectl is not there, which forwards a port to the door; install it, or {_HOW}")
        self._command = [program, *_flags(cluster), f"--namespace={service['metadata']['namespace']}"]
        self._command += ["port-forward", f"svc/{service['metadata']['name']}"]
        self._remote = next((port["port"] for port in service["spec"].get("ports", ())), DOOR_PORT)
        self._process: subprocess.Popen[str] | None = None
        self.port = 0

    def start(self) -> None:
        """Begin. Raises OperatorError with kubectl's words."""
        words = f"{self.port or ''}:{self._remote}"
        self._process = subprocess.Popen(
            [*self._command, words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if "->" not in line:
            _, words = self._process.communicate()
            raise OperatorError(f"the port to the door cannot be forwarded: {words.strip() or line.strip()}")
        self.port = int(line.partition(" -> ")[0].rpartition(":")[2])

    def hold(self) -> None:
        """Keep it up until Ctrl-C: it ends with the pod that it leads to."""
        while True:
            assert self._process is not None
            self._process.wait()
            time.sleep(AGAIN_S)
            with contextlib.suppress(OperatorError):  # the next pod may not be there yet
                self.start()

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.terminate()
            self._process.communicate()


@contextlib.contextmanager
def reached(cluster: Cluster) -> Iterator[tuple[str, Forward | None]]:
    """Address of the door while it can be reached; with a forward, unless --door gave a URL. Raises OperatorError."""
    wanted = cluster.arguments.door or ""
    if "://" in wanted:
        yield wanted.rstrip("/"), None
        return
    forward = Forward(cluster, _service(cluster, wanted))
    try:
        forward.start()
        yield f"http://127.0.0.1:{forward.port}", forward
    finally:
        forward.stop()


def _service(cluster: Cluster, wanted: str) -> Object:
    """The door's Service: the one that is named, else the only one of the release.

    It will hear the caller's token, and labels can be written by whoever may write a Service anywhere. So the namespace
    comes from the CRD, which only the cluster's administrators write.
    """
    if wanted:
        return _named(cluster, wanted)
    namespace = _release_namespace(cluster)
    try:
        found = cluster.run(cluster.api.list_objects(SERVICES, namespace, labels=LABELS)).items
    except ForbiddenError as error:
        raise OperatorError(f"you may not list the Services of {namespace!r}, where the door is; {_HOW}") from error
    if len(found) != 1:
        names = ", ".join(f"{one['metadata']['namespace']}/{one['metadata']['name']}" for one in found)
        what = f"there are several doors ({names})" if found else f"{namespace!r}, the release's namespace, has no door"
        raise OperatorError(f"{what}; {_HOW}")
    return found[0]


def _named(cluster: Cluster, wanted: str) -> Object:
    namespace, _, name = wanted.partition("/")
    if not re.fullmatch(NAME_PATTERN, namespace) or not re.fullmatch(NAME_PATTERN, name):
        raise OperatorError(f"--door {wanted}: this is no NAMESPACE/SERVICE; {_HOW}")
    service = cluster.run(cluster.api.get(SERVICES, namespace, name))
    if service is None:
        raise OperatorError(f"--door {wanted}: there is no such Service; {_HOW}")
    return service


def _release_namespace(cluster: Cluster) -> str:
    """Where helm has installed the chart. Raises OperatorError if that cannot be told."""
    try:
        definition = cluster.run(cluster.api.get(DEFINITIONS, None, f"{PLURAL}.{GROUP}"))
    except ForbiddenError as error:
        text = f"you may not read the CustomResourceDefinition {PLURAL}.{GROUP}, which tells where the door is"
        raise OperatorError(f"{text}; {_HOW}") from error
    namespace = (definition or {}).get("metadata", {}).get("annotations", {}).get(RELEASE_NAMESPACE)
    if not namespace:
        text = f"the CustomResourceDefinition {PLURAL}.{GROUP} has no annotation {RELEASE_NAMESPACE}"
        raise OperatorError(f"{text}, so that the door's namespace is not known; {_HOW}")
    return str(namespace)


def _flags(cluster: Cluster) -> list[str]:
    given = {"kubeconfig": cluster.arguments.kubeconfig, "context": cluster.context}
    return [f"--{name}={value}" for name, value in given.items() if value]


def token_for(cluster: Cluster, door: str, job: ClusterJob | None) -> str:
    """A token that the door takes: of the kubeconfig, else of the job. Raises HubError with the door's words."""
    path = "/api/v1/jobs" if job is None else f"/api/v1/jobs/{job.namespace}/{job.name}"
    refusal = "your kubeconfig has no token" + ("; name a job" if job is None else "")
    for token in _tokens(cluster, job):
        answer = call(door, "GET", path, token=token)
        if answer.is_success:
            return token
        refusal = plain(problem_of(answer))
        if answer.status_code not in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            break
    raise HubError(f"the door does not let you in: {refusal}")


def _tokens(cluster: Cluster, job: ClusterJob | None) -> Iterator[str]:
    own = cluster.bearer()
    if own is not None:
        yield own
    if job is None:
        return
    with contextlib.suppress(ApiError):  # few may read Secrets
        secret = cluster.run(cluster.api.get(SECRETS, job.namespace, f"{job.name}-tokens-{job.uid[:8]}"))
        if secret is not None:
            text = base64.b64decode(secret["data"]["secret"]).decode("ascii").strip()
            yield derive(text, Role.VIEWER)


def call(door: str, method: str, path: str, *, token: str, json: Any = None) -> httpx.Response:  # noqa: ANN401
    """One request to the door. Raises HubError if it does not answer."""
    try:
        with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
            return client.request(method, f"{door}{path}", json=json, headers={"Authorization": f"Bearer {token}"})
    except httpx.HTTPError as error:
        raise HubError(f"{door}: the door does not answer: {error}") from error
