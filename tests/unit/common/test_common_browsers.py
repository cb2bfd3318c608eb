"""Checks of servers on browsers: origins, names of this machine, and paths of the page."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.web.origin import (
    add_meta_tags,
    bearer_token,
    can_open_localhost_name,
    is_route,
    is_same_origin,
    is_same_site_navigation,
    login_form,
    loopback_alias,
)


def test_bearer_tokens() -> None:
    assert bearer_token({"authorization": "bearer  abc "}) == "abc"
    assert bearer_token({"authorization": "Bearer"}) is None
    assert bearer_token({"authorization": "Basic abc"}) is None


@pytest.mark.parametrize(
    ("headers", "same"),
    [
        ({}, True),
        ({"origin": "http://gateway:1", "host": "gateway:1"}, True),
        ({"origin": "http://gateway:2", "host": "gateway:1"}, False),
        ({"origin": "null", "host": "gateway:1"}, False),
        ({"origin": "", "host": "gateway:1"}, False),
        ({"origin": "http://[", "host": "gateway:1"}, False),
        ({"origin": "ftp://gateway:1", "host": "gateway:1"}, False),
        ({"origin": "https://gateway.example", "host": "gateway.example"}, True),
    ],
)
def test_origins(headers: dict[str, str], same: bool) -> None:
    assert is_same_origin(headers) is same


@pytest.mark.parametrize(
    ("host", "port"), [("127.0.0.1:8080", ":8080"), ("localhost", ""), ("LOCALHOST:1", ":1"), ("[::1]:80", ":80")]
)
def test_this_machine_gets_a_name_for_each_forward(host: str, port: str) -> None:
    names = {loopback_alias(host, "gateway") for _ in range(8)}
    assert len(names) == 8
    assert all(re.fullmatch(rf"gateway-[0-9a-f]{{16}}\.localhost{port}", name or "") for name in names)


@pytest.mark.parametrize(
    "host",
    [
        *(None, "", "gateway.example", "gateway-1.localhost:8080", "10.0.0.1:80"),
        *("[", "localhost:x", "127.0.0.1:99999", "a/b@c"),
        *("127.0.0.5:80", "127.9.9.9", "[::ffff:127.0.0.1]:80", "2130706433"),
    ],
)
def test_other_hosts_keep_their_name(host: str | None) -> None:
    """Check also those of this machine to which no name below `localhost` leads."""
    assert loopback_alias(host, "gateway") is None


@pytest.mark.parametrize(
    ("agent", "opens"),
    [
        ("Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0", True),
        ("Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/140.0.0.0 Safari/537.36", True),
        ("Mozilla/5.0 (X11; Linux) AppleWebKit/537.36 (KHTML, like Gecko) HeadlessChrome/140.0 Safari/537.36", True),
        ("Mozilla/5.0 (Macintosh) AppleWebKit/605.1.15 (KHTML, like Gecko) Version/18.0 Safari/605.1.15", False),
    ],
)
def test_who_finds_names_below_localhost(agent: str, opens: bool) -> None:
    loads = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert can_open_localhost_name(loads | {"user-agent": agent}) is opens
    assert not can_open_localhost_name({"user-agent": agent, "sec-fetch-mode": "cors"})


@given(st.text())
def test_no_host_or_origin_is_too_odd(text: str) -> None:
    loopback_alias(text, "gateway")
    is_same_origin({"origin": text, "host": "gateway:1"})
    can_open_localhost_name({"sec-fetch-mode": text})


@pytest.mark.parametrize(("site", "here"), [(None, True), ("none", True), ("same-origin", True), ("same-site", False)])
def test_who_led_a_browser_here(site: str | None, here: bool) -> None:
    assert is_same_site_navigation({} if site is None else {"sec-fetch-site": site}) is here
    assert not is_same_site_navigation({"sec-fetch-site": "cross-site"})


@pytest.mark.parametrize("path", ["", "jobs", "jobs/demo", "a_b/c-d/", "~x"])
def test_a_route_of_the_page_is_plain_words(path: str) -> None:
    assert is_route(path)


@given(st.text(max_size=40))
def test_nothing_odd_is_a_route_of_the_page(text: str) -> None:
    assert not is_route(f"a{text}\0")
    assert not is_route(f"{text}..")
    assert not is_route("a" * 257)
    assert is_route(text) == (re.fullmatch(r"([A-Za-z0-9_~-]+(/[A-Za-z0-9_~-]+)*/?)?", text) is not None)


def test_marks_stand_in_the_head_once_and_a_reason_is_text() -> None:
    assert add_meta_tags("<html><head><title>x</title></head><head>", "<a>", "<b>").startswith(
        "<html><head><a><b><title>"
    )
    assert add_meta_tags("<html><head></head>") == "<html><head></head>"
    assert "<p>&lt;script&gt;</p>" in login_form("<script>")
