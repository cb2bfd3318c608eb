"""Conformance of the hub to its OpenAPI document for any request (schemathesis)."""

import contextlib
import functools
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import schema_checks
import schemathesis
import scope_rank_zero
import scope_session
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi import checks

from megatronapp_analyzer.scope.probes.rank0_client import Rank0Client
from megatronapp_common.web.tokens import TokenRole, derive_token, new_secret

DOCUMENT = json.loads((pathlib.Path(__file__).parents[3] / "frontend" / "src" / "api" / "hub.json").read_text())
"""The committed document. That it is the hub's is tested in test_hub_api; making it here would take each process that
collects tests half a second."""
OPERATIONS = [(method.upper(), path) for path, item in sorted(DOCUMENT["paths"].items()) for method in item]
OPEN = {"/healthz", "/readyz", "/metrics"}


@functools.cache
def schema() -> Any:
    """Read the document once: schemathesis takes a tenth of a second of processor time for it."""
    return schemathesis.openapi.from_dict(DOCUMENT)


@functools.cache
def recording() -> scope_session.Recording:
    return scope_session.record(tokens=3)


def takes_something(method: str, path: str) -> bool:
    """A request could be wrong: there is a body, or a parameter that not every text fits."""
    operation = DOCUMENT["paths"][path][method.lower()]
    schemas = [parameter["schema"] for parameter in operation.get("parameters", ()) if parameter["in"] != "header"]
    return "requestBody" in operation or any(set(schema) - {"type", "title"} for schema in schemas)


CASES = [
    *((*operation, GenerationMode.POSITIVE) for operation in OPERATIONS),
    *((*operation, GenerationMode.NEGATIVE) for operation in OPERATIONS if takes_something(*operation)),
]


@contextlib.contextmanager
def shown_by(hub: Any) -> Iterator[Any]:
    """A hub whose core has seen a run, with a model that answers."""
    token = derive_token(hub.secret, TokenRole.SERVE)
    core = hub.hub.scope.core
    for rank, frame in scope_session.rank_frames(recording()):
        core.ingest.take_frame(0, rank, frame)
    with scope_rank_zero.serve(scope_rank_zero.RankZero(recording(), token)) as rank_zero:
        hub.hub.scope.probe_client.client = Rank0Client(rank_zero.url, token)
        yield hub


@pytest.fixture(scope="module")
def read_only(serve_as: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A hub for requests that change nothing."""
    with serve_as(tmp_path_factory.mktemp("read-only"), new_secret()) as hub, shown_by(hub):
        yield hub


@pytest.fixture
def shown(request: pytest.FixtureRequest, method: str) -> Iterator[Any]:
    if method == "GET":
        yield request.getfixturevalue("read_only")
    else:
        with shown_by(request.getfixturevalue("hub")) as hub:
            yield hub


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_every_answer_matches_the_openapi_document(shown: Any, method: str, path: str, mode: GenerationMode) -> None:
    def known(case: "Case[Any]") -> None:
        if mode is GenerationMode.POSITIVE and "run" in case.path_parameters:
            case.path_parameters.update({"run": scope_session.RUN})

    schema_checks.check(
        schema()[path][method],
        mode,
        base_url=shown.url,
        headers={"Authorization": f"Bearer {derive_token(shown.secret, TokenRole.CONTROLLER)}"},
        change=known,
        more=() if path in OPEN else (checks.ignored_auth,),
    )
