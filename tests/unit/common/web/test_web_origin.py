"""Checks of servers on browsers: origins, and names of this machine."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.web.origin import (
    bearer_token,
    can_open_localhost_name,
    is_own_page,
    is_same_origin,
    is_same_site_navigation,
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
def test_the_loopback_host_gets_a_new_alias_for_each_forward(host: str, port: str) -> None:
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


@pytest.mark.parametrize(
    ("site", "origin", "reading", "changing"),
    [
        (None, None, True, True),
        ("same-origin", "http://hub:1", True, True),
        ("none", "http://elsewhere", True, False),
        ("cross-site", "http://hub:1", False, False),
    ],
)
def test_a_cookie_counts_for_requests_of_our_own_page(
    site: str | None, origin: str | None, reading: bool, changing: bool
) -> None:
    headers = {"host": "hub:1", "sec-fetch-site": site, "origin": origin}
    given = {name: value for name, value in headers.items() if value is not None}
    assert (is_own_page(given, reads=True), is_own_page(given, reads=False)) == (reading, changing)
