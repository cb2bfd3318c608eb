"""Routes, marks and files of the built page, and the login form."""

import pathlib
import re

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from megatronapp_common.web import problems
from megatronapp_common.web.static_pages import ELSEWHERE_MARK, is_route, login_page, page_response, read_login, resolve

MARK = "<mark>"
LIMIT = 100


def client(root: pathlib.Path | None) -> httpx.AsyncClient:
    async def page(request: Request) -> Response:
        return page_response(request, root, request.path_params["path"], missing="Build it.", mark=MARK)

    async def login(request: Request) -> Response:
        return PlainTextResponse(await read_login(request, LIMIT, "hub"))

    app = Starlette(routes=[Route("/login", login, methods=["POST"]), Route("/{path:path}", page)])
    problems.install(app, {})
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here")


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "outside.txt").write_text("secret")
    built = tmp_path / "dist"
    (built / "assets").mkdir(parents=True)
    (built / "index.html").write_text("<html><head><title>x</title></head><head>")
    (built / "assets" / "app.js").write_text("code")
    (built / "icon.svg").write_text("icon")
    (built / "link.txt").symlink_to(tmp_path / "outside.txt")
    return built


@pytest.mark.parametrize("path", ["", "jobs", "jobs/demo", "a_b/c-d/", "~x"])
def test_a_route_of_the_page_is_a_plain_path(path: str) -> None:
    assert is_route(path)


@given(st.text(max_size=40))
def test_nothing_odd_is_a_route_of_the_page(text: str) -> None:
    assert not is_route(f"a{text}\0")
    assert not is_route(f"{text}..")
    assert not is_route("a" * 257)
    assert is_route(text) == (re.fullmatch(r"([A-Za-z0-9_~-]+(/[A-Za-z0-9_~-]+)*/?)?", text) is not None)


def test_no_name_leaves_the_folder(root: pathlib.Path) -> None:
    assert resolve(root, "icon.svg") == root / "icon.svg"
    assert [resolve(root, name) for name in ("../outside.txt", "link.txt", "assets", "a\0b", "a" * 5000)] == [None] * 5


@pytest.mark.asyncio
async def test_the_page_has_its_marks_once_and_assets_stay_in_the_cache(root: pathlib.Path) -> None:
    async with client(root) as browser:
        for path in ("/", "/jobs/demo", "/index.html"):
            answer = await browser.get(path)
            assert answer.text == f"<html><head>{MARK}<title>x</title></head><head>"
            assert (answer.headers["cache-control"], answer.headers["x-frame-options"]) == ("no-cache", "DENY")
        led = await browser.get("/", headers={"Sec-Fetch-Site": "cross-site"})
        assert f"<head>{MARK}{ELSEWHERE_MARK}<title>" in led.text
        assert "immutable" in (await browser.get("/assets/app.js")).headers["cache-control"]
        assert (await browser.get("/icon.svg")).headers["cache-control"] == "no-cache"


@pytest.mark.asyncio
async def test_what_is_not_there_is_a_404_with_a_fitting_hint(root: pathlib.Path) -> None:
    async with client(root) as browser, client(None) as bare:
        for path in ("/none.js", "/link.txt", "/api/v1/none"):
            answer = await browser.get(path)
            assert (answer.status_code, answer.json()["hint"]) == (404, problems.WHERE)
        answer = await bare.get("/")
        assert (answer.status_code, answer.json()["hint"]) == (404, "Build it.")


@pytest.mark.asyncio
async def test_a_form_is_read_from_our_own_page_up_to_its_limit() -> None:
    async with client(None) as browser:
        assert (await browser.post("/login", content=b"token=%20abc+&token=x")).text == "abc"
        assert (await browser.post("/login", content=b"\xff\x00=")).text == ""
        other = await browser.post("/login", content=b"token=abc", headers={"Origin": "http://elsewhere"})
        assert (other.status_code, other.json()["message"]) == (403, "this form is not the hub's")
        long = await browser.post("/login", content=b"token=" + b"a" * LIMIT)
        assert (long.status_code, long.json()["code"]) == (413, "too-long")


def test_a_reason_is_text_and_no_login_is_cached() -> None:
    answer = login_page(401, "<script>")
    assert "<p>&lt;script&gt;</p>" in bytes(answer.body).decode()
    assert (answer.status_code, answer.headers["cache-control"]) == (401, "no-store")
