"""Conformance of the gateway to its own OpenAPI document for any request (schemathesis), in front of a real hub."""

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import gateway
import kube
import pytest
import schema_checks
import schemathesis
from pytest_workers import FULL
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi import checks

SCOPE = "/api/v1/jobs/{namespace}/{name}/scope"
OPERATIONS = (
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/api/v1/jobs"),
    ("POST", "/api/v1/tickets"),
    ("DELETE", "/api/v1/session"),
    ("GET", "/api/v1/jobs/{namespace}/{name}"),
    ("POST", "/api/v1/jobs/{namespace}/{name}/faults"),
    ("DELETE", "/api/v1/jobs/{namespace}/{name}/faults/{fault}"),
    ("POST", "/api/v1/jobs/{namespace}/{name}/training/{action}"),
    ("POST", "/api/v1/jobs/{namespace}/{name}/trace/windows"),
    ("DELETE", "/api/v1/jobs/{namespace}/{name}/trace/windows/{window}"),
    ("GET", "/api/v1/jobs/{namespace}/{name}/{path}"),
    ("GET", SCOPE),
    ("GET", f"{SCOPE}/{{path}}"),
    ("POST", f"{SCOPE}/runs"),
    ("PATCH", f"{SCOPE}/runs/{{run}}"),
    ("DELETE", f"{SCOPE}/runs/{{run}}"),
    ("POST", f"{SCOPE}/runs/{{run}}/pca"),
    ("POST", f"{SCOPE}/comparisons"),
    ("DELETE", f"{SCOPE}/comparisons/{{run}}"),
    ("POST", f"{SCOPE}/sweeps"),
    ("DELETE", f"{SCOPE}/sweeps/{{run}}"),
)
CASES = [
    *((*operation, GenerationMode.POSITIVE) for operation in OPERATIONS),
    *((*operation, GenerationMode.NEGATIVE) for operation in OPERATIONS[2:]),  # probes take nothing that could be wrong
]
EXAMPLES = int(os.environ.get("SCHEMA_EXAMPLES", "80" if FULL else "4"))
"""Fewer than of other interfaces, because each request is reviewed by the API server."""


@pytest.fixture(scope="module")
def served(
    plane: kube.ControlPlane, reviewing: gateway.Gateway, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[gateway.GatewayJob, str]]:
    """A job with a real hub, and a token that opens it."""
    gateway.create(plane, "/api/v1/namespaces", {"metadata": {"name": "schema"}})
    job = gateway.make_job(plane, "schema", "demo")
    token = gateway.account(plane, "schema", "runner", grants=[gateway.on_jobs("get", "list", "update")])
    folder: pathlib.Path = tmp_path_factory.mktemp("hub")
    with gateway.hub(job, folder, port=reviewing.hub_port, key=reviewing.key):
        yield job, token


@pytest.fixture(scope="module")
def schema(reviewing: gateway.Gateway) -> Any:
    """Read the document once: schemathesis takes a tenth of a second of processor time for it."""
    return schemathesis.openapi.from_url(f"{reviewing.url}/api/v1/openapi.json")


def test_all_operations_are_known(reviewing: gateway.Gateway) -> None:
    with reviewing.client() as client:
        document = client.get("/api/v1/openapi.json").json()
    found = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert found == set(OPERATIONS)


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_every_answer_matches_the_openapi_document(
    *,
    reviewing: gateway.Gateway,
    schema: Any,
    served: tuple[gateway.GatewayJob, str],
    method: str,
    path: str,
    mode: GenerationMode,
) -> None:
    job, token = served

    def known(case: "Case[Any]") -> None:
        if mode is GenerationMode.POSITIVE:
            case.path_parameters.update({"namespace": job.namespace, "name": job.name})

    schema_checks.check(
        schema[path][method],
        mode,
        headers={"Authorization": f"Bearer {token}"},
        change=known,
        more=(checks.ignored_auth,),
        examples=EXAMPLES,
    )
