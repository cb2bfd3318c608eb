"""`megatronapp trace export` on a cluster: the trace of a job's hub, through the gateway."""

import argparse
import json
from http import HTTPStatus
from typing import Any

from megatronapp_common.cli import write_trace_file
from megatronapp_common.text.terminal import replace_control_characters
from megatronapp_operator.cli.cluster import gateway_client, tokens
from megatronapp_operator.cli.cluster.connection import ClusterJob, opened
from megatronapp_operator.cli.inject import problem_of
from megatronapp_operator.errors import HubError, OperatorError

ANSWER_S = 120.0
"""Seconds for the trace, which the hub may have to read from its disk."""
OMITTED_HEADER = "Megatronapp-Omitted"
"""Header of a hub's answer that says what is missing in it."""
PERFETTO_SUFFIXES = frozenset({".pftrace", ".perfetto-trace"})


def main(arguments: argparse.Namespace) -> int:
    """Fetch the trace and write it; return the exit code."""
    first, last, output = arguments.first, arguments.last, arguments.output
    if first is not None and last is not None and last < first:
        raise OperatorError(f"--to is before --from: {last} is less than {first}; swap them")
    if arguments.verdict is not None and (first, last) != (None, None):
        raise OperatorError("--verdict chooses its own steps; leave out --from and --to")
    form = arguments.format or ("perfetto" if output.suffix in PERFETTO_SUFFIXES else "chrome")
    given = (("from", first), ("to", last), ("verdict", arguments.verdict), ("format", form))
    query = {name: str(value) for name, value in given if value is not None}
    with opened(arguments) as cluster:
        job = cluster.view(arguments.job)
        with gateway_client.open_gateway(cluster) as gateway:
            token = tokens.token_for(cluster, gateway, job)
            path = f"/api/v1/jobs/{job.namespace}/{job.name}/trace"
            answer = gateway_client.call_gateway(gateway, "GET", path, token=token, query=query, timeout_s=ANSWER_S)
    if not answer.is_success:
        raise HubError(replace_control_characters(problem_of(answer)) + _why(job, answer.status_code))
    described = summary(answer.content, form)
    write_trace_file(output, answer.content)
    omitted = answer.headers.get(OMITTED_HEADER)
    missing = f" ({replace_control_characters(omitted)})" if omitted else ""
    print(f"{output}: {described}, from the running hub{missing}; open it at https://ui.perfetto.dev")
    return 0


def summary(content: bytes, form: str) -> str:
    """Describe a trace in some words. Raises HubError for any other content: a hub is not trusted."""
    if form == "perfetto" and content[:1] == b"\n":  # the first packet of a protobuf trace
        return f"{len(content) / 1e6:.2f} MB"
    events = events_of(content)
    spans = sum(event.get("ph") == "X" and event.get("cat") != "arrow" for event in events)  # no ends of arrows
    arrows = sum(event.get("ph") == "s" for event in events)
    return f"{spans} spans, {arrows} arrows"


def _why(job: ClusterJob, status: int) -> str:
    """Return a hint that traces end with a job on a cluster, while a laptop keeps them."""
    if status == HTTPStatus.SERVICE_UNAVAILABLE and job.ended:
        return (
            f"; {job.name} has ended, and its traces were deleted with its hub unless spec.analyzer.volume keeps them"
        )
    return ""


def events_of(content: bytes) -> list[dict[str, Any]]:
    """Parse the events of a Chrome trace. Raises HubError for any other content: a hub is not trusted."""
    try:
        events = json.loads(content)["traceEvents"]
        if isinstance(events, list) and all(isinstance(event, dict) for event in events):
            return events
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise HubError("the job's hub did not answer with a trace; read the log of its pod")
