"""Conformance of the hub to its OpenAPI document for any request (schemathesis)."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import schema_checks
import schemathesis
import scope_rank_zero
import scope_session
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from megatronapp_analyzer.hub.http.app import build_api
from megatronapp_analyzer.scope.probes.rank0_client import Rank0Client
from megatronapp_common.web.tokens import TokenRole, derive_token

DOCUMENT = build_api().openapi()
OPERATIONS = [(method.upper(), path) for path, item in sorted(DOCUMENT["paths"].items()) for method in item]
SCOPE = "/api/v1/scope"
RESERVED = {("POST", f"{SCOPE}/perturbations"), ("POST", f"{SCOPE}/training")}
"""These answer 501."""
OPEN = {"/healthz", "/readyz", "/metrics"}
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


@functools.cache
def recording() -> scope_session.Recording:
    return scope_session.record(tokens=3)


def takes_something(method: str, path: str) -> bool:
    """A request could be wrong: there is a body, or a parameter that not every text fits."""
    operation = DOCUMENT["paths"][path][method.lower()]
    schemas = [parameter["schema"] for parameter in operation.get("parameters", ()) if parameter["in"] != "header"]
    return "requestBody" in operation or any(set(schema) - {"type", "title"} for schema in schemas)


@pytest.fixture
def shown(hub: Any) -> Iterator[Any]:
    """A hub whose core has seen a run, with a model that answers."""
    token = derive_token(hub.secret, TokenRole.SERVE)
    core = hub.hub.scope.core
    for rank, frame in scope_session.rank_frames(recording()):
        core.ingest.take_frame(0, rank, frame)
    with scope_rank_zero.serve(scope_rank_zero.RankZero(recording(), token)) as rank_zero:
        hub.hub.scope.probe_client.client = Rank0Client(rank_zero.url, token)
        yield hub


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_every_answer_matches_the_openapi_document(shown: Any, method: str, path: str, mode: GenerationMode) -> None:
    if mode is GenerationMode.NEGATIVE and not takes_something(method, path):
        return

    def known(case: "Case[Any]") -> None:
        if mode is GenerationMode.POSITIVE and "run" in case.path_parameters:
            case.path_parameters.update({"run": scope_session.RUN})

    schema_checks.check(
        schemathesis.openapi.from_dict(DOCUMENT)[path][method],
        mode,
        base_url=shown.url,
        headers={"Authorization": f"Bearer {derive_token(shown.secret, TokenRole.CONTROLLER)}"},
        change=known,
        but=not_a_server_error if (method, path) in RESERVED else None,
        more=() if path in OPEN else (checks.ignored_auth,),
    )
