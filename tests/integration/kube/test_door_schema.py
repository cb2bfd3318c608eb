"""The door keeps to its own OpenAPI document, whatever it is asked (schemathesis), in front of a real hub."""

import pathlib
from collections.abc import Iterator
from typing import Any

import door
import kube
import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

SCOPE = "/api/v1/jobs/{namespace}/{name}/scope"
RESERVED = (("POST", f"{SCOPE}/perturbations"), ("POST", f"{SCOPE}/training"))
"""These answer 501."""
OPERATIONS = (
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/api/v1/jobs"),
    ("POST", "/api/v1/tickets"),
    ("DELETE", "/api/v1/session"),
    ("GET", "/api/v1/jobs/{namespace}/{name}"),
    ("POST", "/api/v1/jobs/{namespace}/{name}/faults"),
    ("DELETE", "/api/v1/jobs/{namespace}/{name}/faults/{fault}"),
    ("GET", "/api/v1/jobs/{namespace}/{name}/{path}"),
    ("GET", SCOPE),
    ("GET", f"{SCOPE}/{{path}}"),
    ("POST", f"{SCOPE}/runs"),
    ("PATCH", f"{SCOPE}/runs/{{run}}"),
    ("DELETE", f"{SCOPE}/runs/{{run}}"),
    ("POST", f"{SCOPE}/runs/{{run}}/pca"),
    *RESERVED,
)
CASES = [
    *((*operation, GenerationMode.POSITIVE) for operation in OPERATIONS),
    *((*operation, GenerationMode.NEGATIVE) for operation in OPERATIONS[2:]),  # probes take nothing that could be wrong
]
EXAMPLES = 12
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.ignored_auth,
]


@pytest.fixture(scope="module")
def served(
    plane: kube.ControlPlane, reviewing: door.Door, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[door.Job, str]]:
    """A job with a real hub, and a token that opens it."""
    door.create(plane, "/api/v1/namespaces", {"metadata": {"name": "schema"}})
    job = door.make_job(plane, "schema", "demo")
    token = door.account(plane, "schema", "runner", grants=[door.on_jobs("get", "list", "update")])
    folder: pathlib.Path = tmp_path_factory.mktemp("hub")
    with door.hub(job, folder, port=reviewing.hub_port, key=reviewing.key):
        yield job, token


def test_all_operations_are_known(reviewing: door.Door) -> None:
    with reviewing.client() as client:
        document = client.get("/api/v1/openapi.json").json()
    found = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert found == set(OPERATIONS)


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_every_answer_is_as_the_document_says(
    reviewing: door.Door, served: tuple[door.Job, str], method: str, path: str, mode: GenerationMode
) -> None:
    job, token = served
    schema = schemathesis.openapi.from_url(f"{reviewing.url}/api/v1/openapi.json")
    operation = schema[path][method]

    @seed(7)
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: "Case[Any]") -> None:
        if mode is GenerationMode.POSITIVE:
            case.path_parameters.update({"namespace": job.namespace, "name": job.name})
        checked = [check for check in CHECKS if check is not not_a_server_error or (method, path) not in RESERVED]
        case.call_and_validate(checks=checked, headers={"Authorization": f"Bearer {token}"})

    ask()
