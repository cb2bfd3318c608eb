"""Check that an interface keeps to its OpenAPI document for any request: schemathesis over one operation.

Tests draw from the same few seeds each time. `make test-full` makes more requests, and draws new seeds, as
SCHEMA_RANDOM=1 does; SCHEMA_EXAMPLES sets the number of requests to each operation.
"""

import os
import random
import re
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

import hypothesis
from hypothesis import assume, given, settings
from pytest_workers import FULL
from schemathesis import Case, CheckContext, GenerationMode, Response
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

SEEDS = (1, 2, 3, 4) if FULL else (1, 2)
EXAMPLES = int(os.environ.get("SCHEMA_EXAMPLES", "320" if FULL else "4"))
"""Requests of each kind to an operation, over all seeds."""
REQUEST_TIMEOUT_S = 120
TOO_LARGE = "413"
"""Status of bodies beyond the limit, which refuses a wrong request as well as one that is valid."""
WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+\.0+")


def wrong_requests_are_refused(context: CheckContext, response: Response, case: "Case[Any]") -> bool | None:
    """Judge as schemathesis does, but where a parameter is written like 0.0.

    schemathesis counts that as no integer. In JSON Schema a number with a zero fractional part is an integer (2020-12,
    validation, section 6.1.1), and the interfaces take it.
    """
    sent = urllib.parse.urlsplit(str(response.request.url))
    texts = [
        *map(urllib.parse.unquote, sent.path.split("/")),
        *(text for _, text in urllib.parse.parse_qsl(sent.query)),
    ]
    if any(WHOLE_NUMBER.fullmatch(text) for text in texts):
        return None
    return checks.negative_data_rejection(context, response, case)


CHECKS = (
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    wrong_requests_are_refused,
)
FRAMING = frozenset({"connection", "content-length", "expect", "host", "te", "trailer", "transfer-encoding", "upgrade"})
"""Headers of HTTP itself: the server refuses wrong ones before the application sees a request, in plain text."""
Change = Callable[["Case[Any]"], None]
"""Makes a drawn request fit what there is, as the name of a run."""


def seeds() -> tuple[int, ...]:
    """Return the seeds of the tests, or fresh ones, which are printed."""
    if not FULL and "SCHEMA_RANDOM" not in os.environ:
        return SEEDS
    drawn = tuple(random.randrange(1 << 32) for _ in SEEDS)
    print(f"seeds {drawn}")
    return drawn


def check(
    operation: Any,
    mode: GenerationMode,
    *,
    headers: Mapping[str, str],
    base_url: str | None = None,
    change: Change | None = None,
    more: tuple[Callable[..., Any], ...] = (),
    examples: int = EXAMPLES,
) -> None:
    """Ask the operation with requests that fit its description, or with ones that do not; all answers must.

    `more`: checks besides the usual ones; `examples`: how many requests over all seeds.
    """
    selected = [*CHECKS, *more]
    rejects = operation.schema.config.checks.negative_data_rejection
    rejects.expected_statuses = sorted({*rejects.expected_statuses, TOO_LARGE})
    for seed in seeds():

        @hypothesis.seed(seed)
        @settings(max_examples=max(examples // len(SEEDS), 1), deadline=None, database=None)
        @given(case=operation.as_strategy(generation_mode=mode))
        def request(case: "Case[Any]") -> None:
            assume(FRAMING.isdisjoint(name.lower() for name in case.headers or ()))
            if change is not None:
                change(case)
            case.call_and_validate(base_url=base_url, checks=selected, headers=dict(headers), timeout=REQUEST_TIMEOUT_S)

        request()
