"""Parts of the gateway that MegaScope needs, and that need no cluster: permitted answers, names, rates, frames."""

import re
import urllib.parse

import numpy as np
import pytest
from fake_clock import FakeClock
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_analyzer.scope.views import tiles
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.web.problems import HttpError, problem_response
from megatronapp_operator.gateway.access.authorization import TOKEN_HOLDER, Caller
from megatronapp_operator.gateway.access.subject_access import User
from megatronapp_operator.gateway.job_catalog import CatalogJob, JobCatalog
from megatronapp_operator.gateway.proxy import websocket_proxy
from megatronapp_operator.gateway.proxy.http_proxy import MAX_IDENTITY, encode_caller_name
from megatronapp_operator.gateway.proxy.rate_limits import RateLimits
from megatronapp_operator.gateway.proxy.response_policy import BYTES, CSV, JSON, PLAIN, TILE, response_rule_for
from megatronapp_operator.gateway.routes import PathSegment
from megatronapp_operator.keys import KeyRing

RUN = "scope/runs/0123456789ab"
SEGMENTS = st.from_regex(re.compile(f"{PathSegment}", re.ASCII), fullmatch=True)


@pytest.mark.parametrize(
    ("path", "query", "types", "file"),
    [
        ("job", "", {JSON}, None),
        ("scope", "format=csv", {JSON}, None),
        (f"{RUN}/attention/0/1/2/0/0/0", "", {JSON, BYTES}, None),
        (f"{RUN}/attention/0/1/2/0", "tile=0,0", {JSON, BYTES}, None),
        (f"{RUN}/session", "format=csv", {JSON, BYTES}, "0123456789ab.scope"),
        (f"{RUN}/values/q", "layer=1", {JSON}, None),
        (f"{RUN}/values/q", "format=json&format=csv", {JSON, CSV}, "0123456789ab-q.csv"),
        (f"{RUN}/values/my.site", "format=npy", {JSON, BYTES}, "0123456789ab-my.site.npy"),
        ("scope/comparisons/0123456789ab", "format=csv", {JSON, CSV}, "comparison-0123456789ab.csv"),
        ("scope/sweeps/0123456789ab", "", {JSON}, None),
        (f"{RUN}/lens", "format=csv", {JSON, CSV}, "0123456789ab-lens.csv"),
        (f"{RUN}/attribution", "token=7&format=csv", {JSON, CSV}, "0123456789ab-attribution.csv"),
        (f"{RUN}/heads", "", {JSON}, None),
        (f"{RUN}/values/q/session", "format=npy", {JSON}, None),
        (f"faults/{RUN}/session", "", {JSON}, None),
        ("trace", "verdict=v1&format=perfetto", {JSON, BYTES}, "trace.pftrace"),
        ("trace", "format=chrome", {JSON}, None),
    ],
)
def test_the_path_decides_which_answers_may_return(path: str, query: str, types: set[str], file: str | None) -> None:
    kind = response_rule_for(path, query)
    assert (set(kind.types), kind.file) == (types, file)


def test_as_many_bytes_pass_as_a_hub_sends_tiles() -> None:
    names = [f"{99999 - place},{99999 - place}" for place in range(tiles.MAX_TILES)]
    ranges = {"run": "0" * 64, "sample": 2**20, "layer": 2**20, "head": 2**20, "level": tiles.MAX_LEVEL}
    largest = tiles.body(ranges, ((name, np.zeros((tiles.TILE, tiles.TILE), np.uint8)) for name in names))
    assert len(largest) <= response_rule_for(f"{RUN}/attention/0/1/2/0").most < len(largest) + tiles.TILE**2
    assert response_rule_for(f"{RUN}/attention/0/1/2/0/0/0").most == tiles.TILE**2


@given(st.lists(SEGMENTS, max_size=8).map("/".join), st.text(max_size=30))
def test_a_file_s_name_is_made_of_plain_letters(path: str, query: str) -> None:
    for whole in (path, f"scope/runs/{path}", f"{RUN}/values/{path}"):
        for form in (query, f"format=csv&{query}", "format=npy"):
            name = response_rule_for(whole, form).file
            assert name is None or re.fullmatch(r"[A-Za-z0-9._~-]+", name)


HEADERS = ["ETag", "X-Tile-Shape", "Retry-After", "Megatronapp-Omitted", "Set-Cookie", "Location"]


@given(st.dictionaries(st.sampled_from(HEADERS), st.text()))
def test_headers_of_a_hub_pass_only_as_what_they_should_be(hub: dict[str, str]) -> None:
    for kind in (PLAIN, TILE, response_rule_for(f"{RUN}/session")):
        found = kind.headers(JSON, hub)
        assert found.pop("content-type") == JSON
        assert set(found) <= {"retry-after", "megatronapp-omitted"} | (
            {"etag", "x-tile-shape", "cache-control"} if kind.tagged else set()
        )
        assert all(value.isascii() and value.isprintable() for value in found.values())


@given(st.text(max_size=300))
def test_a_name_in_a_header_is_printable_ascii_and_unambiguous(name: str) -> None:
    encoded = encode_caller_name(name)
    assert encoded.isascii() and (encoded.isprintable() or not encoded) and len(encoded) <= MAX_IDENTITY
    if len(encoded) < MAX_IDENTITY and name == name.strip() and name.isprintable():
        assert urllib.parse.unquote(encoded) == name
    assert encode_caller_name("system:serviceaccount:team:jane") == "system:serviceaccount:team:jane"


def test_a_viewer_has_an_alias_per_job_and_no_name() -> None:
    catalog = JobCatalog(None, keys=KeyRing(["ab" * 32]))  # type: ignore[arg-type]
    jane, joe = Caller(User("jane"), frozenset()), Caller(User("joe"), frozenset())
    first, second = CatalogJob("team", "gpt", "u1"), CatalogJob("team", "gpt", "u2")
    aliases = {catalog.alias(job, caller.identity) for job in (first, second) for caller in (jane, joe)}
    assert len(aliases) == 4 and catalog.alias(first, jane.identity) in aliases
    assert not any("jane" in alias or "joe" in alias for alias in aliases)
    assert (jane.name, Caller(None, frozenset({"u1"})).name) == ("jane", TOKEN_HOLDER)


def test_tokens_are_refilled_over_time_and_a_refusal_has_the_delay() -> None:
    clock = FakeClock(100.0)
    rates = RateLimits("calls", turns=3, fill_s=15.0, clock=clock)
    jane, joe = {"jane": 1, "the job": 2}, {"joe": 1, "the job": 2}
    for _ in range(3):
        rates.acquire(jane)
    with pytest.raises(HttpError, match="jane has had 3 calls in a short time") as refusal:
        rates.acquire(jane)
    assert (refusal.value.status, refusal.value.retry_s) == (429, 5)
    assert problem_response(refusal.value).headers["retry-after"] == "5"
    for _ in range(3):
        rates.acquire(joe)
    with pytest.raises(HttpError, match="the job has had 6 calls"):
        rates.acquire({"jim": 1, "the job": 2})
    clock.now += 4.9
    with pytest.raises(HttpError, match="jane"):
        rates.acquire(jane)
    clock.now += 0.2
    rates.acquire(jane)
    clock.now += 1000
    for _ in range(3):
        rates.acquire(jane)


def test_only_prompts_and_coordinates_are_longer_than_a_message() -> None:
    def frame(kind: FrameType, size: int) -> bytes:
        return frames.encode(Frame(kind, {}, bytes(size - 24)))

    most = websocket_proxy.SCOPE_RULES.most
    for kind in FrameType:
        assert websocket_proxy.SCOPE_RULES.refuses(frame(kind, most)) is None
        long = websocket_proxy.SCOPE_RULES.refuses(frame(kind, most + 8))
        assert (long is None) == (kind in {FrameType.SCOPE_RUN, FrameType.SCOPE_PCA})
        assert websocket_proxy.RULES.refuses(frame(kind, most + 8)) is None
    assert websocket_proxy.SCOPE_RULES.refuses("text") == websocket_proxy.RULES.refuses("text") == "the hub sent text"
    assert websocket_proxy.SCOPE_RULES.refuses(b"") is None
