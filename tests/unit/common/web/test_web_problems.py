"""Answers that are not a success, as clients of all servers receive them."""

import httpx
import pytest
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel

from megatronapp_common.web import problems
from megatronapp_common.web.problems import HttpError

pytestmark = pytest.mark.asyncio


class Body(BaseModel):
    count: int


def create_app() -> FastAPI:
    app = FastAPI()
    converters: dict[type[Exception], problems.Convert] = {
        RequestValidationError: problems.invalid_request,
        LookupError: lambda request, error: HttpError(410, "lost", f"{request.url.path}: {error}"),
    }
    problems.install(app, converters)

    @app.post("/count")
    async def count(body: Body) -> int:
        return body.count

    @app.get("/{what}")
    async def refuse(what: str) -> None:
        if what == "lookup":
            raise LookupError("no such thing")
        status, _, retry = what.partition("-")
        raise HttpError(int(status), "code", "text", "hint", retry_s=int(retry) if retry else None, param="what")

    return app


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(create_app()), base_url="http://here")


async def test_a_body_has_three_fields_in_their_order_and_a_401_names_its_scheme() -> None:
    async with client() as browser:
        answers = [await browser.get(path) for path in ("/401", "/429-7", "/404")]
    assert {answer.text for answer in answers} == {'{"code":"code","message":"text","hint":"hint"}'}
    assert [answer.headers.get("www-authenticate") for answer in answers] == ["Bearer", None, None]
    assert [answer.headers.get("retry-after") for answer in answers] == [None, "7", None]


async def test_errors_of_routing_and_of_a_part_have_the_same_form() -> None:
    async with client() as browser:
        answers = [
            await browser.get("/a/b"),
            await browser.post("/404"),
            await browser.get("/lookup"),
            await browser.post("/count", json={"count": "x"}),
        ]
    found = [(answer.status_code, answer.json()["code"], answer.json()["hint"]) for answer in answers]
    assert found == [
        (404, "not-found", problems.WHERE),
        (405, "method-not-allowed", problems.WHERE),
        (410, "lost", ""),
        (422, "invalid-request", "See /api/v1/openapi.json for the fields."),
    ]
    assert answers[0].json()["message"] == "/a/b: Not Found"
    assert answers[1].headers["allow"] == "GET"
    assert answers[2].json()["message"] == "/lookup: no such thing"
    assert answers[3].json()["message"].startswith("count: ")
