"""MegaScope's interface keeps to its OpenAPI document, whatever it is asked (schemathesis)."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
import scope_rank_zero
import scope_session
from hypothesis import HealthCheck, given, seed, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from megatronapp_analyzer.hub.scope.serving import ServeClient
from megatronapp_common.tokens import Role, derive

SCOPE = "/api/v1/scope"
RUN = f"{SCOPE}/runs/{{run}}"
READING = (
    ("GET", SCOPE),
    ("GET", f"{SCOPE}/runs"),
    ("GET", RUN),
    ("GET", f"{RUN}/attention/{{sample}}/{{layer}}/{{head}}/{{level}}/{{q}}/{{k}}"),
    ("GET", f"{RUN}/attention/{{sample}}/{{layer}}/{{head}}/{{level}}"),
    ("GET", f"{RUN}/values/{{site}}"),
    ("GET", f"{RUN}/pca/variance"),
    ("GET", f"{RUN}/session"),
)
CHANGING = (
    ("POST", f"{SCOPE}/runs"),
    ("PATCH", RUN),
    ("DELETE", RUN),
    ("POST", f"{RUN}/pca"),
)
RESERVED = {("POST", f"{SCOPE}/perturbations"), ("POST", f"{SCOPE}/training")}
EXAMPLES = 10
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.ignored_auth,
]
CASES = {
    GenerationMode.POSITIVE: (*READING, *CHANGING),
    GenerationMode.NEGATIVE: (*READING[3:6], CHANGING[0], CHANGING[1], CHANGING[3]),
}


@functools.cache
def recording() -> scope_session.Recording:
    return scope_session.record(tokens=3)


@pytest.fixture
def shown(hub: Any) -> Iterator[Any]:
    """A hub whose desk has seen a run, with a model that answers."""
    token = derive(hub.secret, Role.SERVE)
    desk = hub.hub.scope.desk
    for rank, frame in scope_session.rank_frames(recording()):
        desk.take(0, rank, frame)
    with scope_rank_zero.serve(scope_rank_zero.RankZero(recording(), token)) as rank_zero:
        hub.hub.scope.asker.client = ServeClient(rank_zero.url, token)
        yield hub


def test_all_operations_are_known(shown: Any) -> None:
    schema = schemathesis.openapi.from_url(f"{shown.url}/api/v1/openapi.json", headers=shown.bearer)
    found = {
        (method.upper(), path)
        for path, item in schema.raw_schema["paths"].items()
        for method in item
        if path.startswith(SCOPE)
    }
    assert found == {*READING, *CHANGING} | RESERVED


@pytest.mark.parametrize("mode", CASES)
def test_every_answer_is_as_the_document_says(shown: Any, mode: GenerationMode) -> None:
    controller = {"Authorization": f"Bearer {derive(shown.secret, Role.CONTROLLER)}"}
    schema = schemathesis.openapi.from_url(f"{shown.url}/api/v1/openapi.json", headers=controller)
    for method, path in CASES[mode]:

        @seed(7)
        @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=schema[path][method].as_strategy(generation_mode=mode))
        def ask(case: "Case[Any]") -> None:
            if mode is GenerationMode.POSITIVE and "run" in (case.path_parameters or {}):
                case.path_parameters.update({"run": scope_session.RUN})
            case.call_and_validate(checks=CHECKS, headers=controller)

        ask()
