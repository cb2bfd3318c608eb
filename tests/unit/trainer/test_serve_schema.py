"""Conformance of the server to its OpenAPI document for any request (schemathesis)."""

import copy
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import schema_checks
import schemathesis
from schemathesis import Case, GenerationMode
from schemathesis.core.failures import FailureGroup
from served_model import ModelServer, started, write_model

OPERATIONS = (
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"),
    ("POST", "/scope/v1/runs"),
    ("GET", "/scope/v1/runs"),
    ("GET", "/scope/v1/runs/{run}"),
    ("DELETE", "/scope/v1/runs/{run}"),
    ("PATCH", "/scope/v1/runs/{run}"),
    ("POST", "/scope/v1/probes"),
    ("POST", "/scope/v1/scores"),
    ("POST", "/scope/v1/analyses"),
    ("POST", "/scope/v1/comparisons"),
    ("GET", "/scope/v1/comparisons"),
    ("GET", "/scope/v1/comparisons/{comparison}"),
    ("DELETE", "/scope/v1/comparisons/{comparison}"),
    ("POST", "/scope/v1/sweeps"),
    ("GET", "/scope/v1/sweeps"),
    ("GET", "/scope/v1/sweeps/{sweep}"),
    ("DELETE", "/scope/v1/sweeps/{sweep}"),
    ("PUT", "/scope/v1/basis"),
)
TAKING_NOTHING = {("GET", path) for path in ("/healthz", "/readyz", "/metrics", "/v1/models", "/tokenizer_info")} | {
    ("GET", "/scope/v1/runs"),
    ("GET", "/scope/v1/comparisons"),
    ("GET", "/scope/v1/sweeps"),
    ("GET", "/v1/models/{name}"),  # each text could be a name
    ("PUT", "/scope/v1/basis"),  # any bytes
}
"""There is no request that these could refuse."""
CASES = [
    *((*operation, GenerationMode.POSITIVE) for operation in OPERATIONS),
    *((*operation, GenerationMode.NEGATIVE) for operation in OPERATIONS if operation not in TAKING_NOTHING),
]


@pytest.fixture(scope="module")
def server(
    run_ranks: Callable[..., list[Any]], forkserver: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ModelServer]:
    """Answers are short, so that what counts is the number of requests."""
    model = pathlib.Path(tmp_path_factory.mktemp("model"))
    run_ranks(1, make, str(model))
    arguments = f"--max-batch-size 2 --queue-length 4 --max-tokens 16 --tokenizer-file {model / 'tokenizer.json'}"
    folder, python = tmp_path_factory.mktemp("server"), forkserver.python()
    with started(folder, model, *arguments.split(), python=python) as server:
        yield server


def make(folder: str) -> None:
    write_model(folder)


@pytest.fixture(scope="module")
def client(server: ModelServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def document(client: httpx.Client) -> Any:
    return client.get("/openapi.json").json()


@pytest.fixture(scope="module")
def schema(document: Any) -> Any:
    """Read the document once: schemathesis takes a tenth of a second of processor time for it."""
    return schemathesis.openapi.from_dict(document)


@pytest.fixture(scope="module")
def run(client: httpx.Client) -> str:
    """A run that is known."""
    started: str = client.post("/scope/v1/runs", json={"prompts": ["a"], "tokens": 1}).json()["run"]
    return started


def test_all_operations_are_known(document: Any) -> None:
    assert {(method.upper(), path) for path, item in document["paths"].items() for method in item} == set(OPERATIONS)


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_every_answer_matches_the_openapi_document(
    *, server: ModelServer, client: httpx.Client, schema: Any, run: str, method: str, path: str, mode: GenerationMode
) -> None:
    def known(case: "Case[Any]") -> None:
        if mode is GenerationMode.POSITIVE and "run" in case.path_parameters:
            case.path_parameters.update({"run": run})

    headers = {"Authorization": client.headers["Authorization"]}
    schema_checks.check(schema[path][method], mode, base_url=server.url, headers=headers, change=known)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_stream_events_match_the_openapi_document(
    server: ModelServer, client: httpx.Client, document: Any, path: str
) -> None:
    is_chat = path != "/v1/completions"
    prompt = {"messages": [{"role": "user", "content": "hello"}]} if is_chat else {"prompt": "hello"}
    logprobs: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2, "echo": True}
    options = {"stream": True, "stream_options": {"include_usage": True, "include_queue": True}, "n": 3}
    operation = schemathesis.openapi.from_dict(document)[path]["POST"]
    case = operation.Case(body=prompt | logprobs | options, media_type="application/json")
    headers = {"Authorization": client.headers["Authorization"]}
    checks = list(schema_checks.CHECKS)
    answer = case.call_and_validate(base_url=server.url, checks=checks, headers=headers)
    assert "event: queue" in answer.text
    other = copy.deepcopy(document)
    other["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["itemSchema"]["anyOf"].pop(1)
    broken = schemathesis.openapi.from_dict(other)[path]["POST"].Case(body=case.body, media_type="application/json")
    with pytest.raises(FailureGroup):
        broken.call_and_validate(base_url=server.url, checks=checks, headers=headers)
