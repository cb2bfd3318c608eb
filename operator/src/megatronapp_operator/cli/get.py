"""`megatronapp get`."""

import argparse
import json
import sys
import time
from typing import Any

import yaml

from megatronapp_operator.backends.process import registry
from megatronapp_operator.backends.process.registry import JobView
from megatronapp_operator.cli.tables import COLUMNS, WIDE_COLUMNS, Table, job_row
from megatronapp_operator.errors import JobNotFoundError

WATCH_S = 0.5


def main(arguments: argparse.Namespace) -> int:
    """Print one job or all; returns the exit code."""
    jobs = _jobs(arguments.job)
    if not jobs and not arguments.watch:
        if arguments.output in {"json", "yaml"}:
            _print_documents(jobs, single=False, output=arguments.output)
        else:
            print("No jobs found.", file=sys.stderr)
        return 0
    table = Table()
    _print(jobs, arguments, table, headers=not arguments.no_headers)
    if arguments.watch:
        _watch(arguments, table, {job.name: job.document for job in jobs})
    return 0


def _jobs(name: str | None) -> list[JobView]:
    return registry.views() if name is None else [registry.view(name)]


def _print(jobs: list[JobView], arguments: argparse.Namespace, table: Table, *, headers: bool) -> None:
    output = arguments.output
    if output in {"json", "yaml"}:
        _print_documents(jobs, single=arguments.job is not None, output=output)
    elif output == "name":
        print("".join(f"megatronjob.megatronapp.io/{job.name}\n" for job in jobs), end="", flush=True)
    else:
        wide = output == "wide"
        heading = [WIDE_COLUMNS if wide else COLUMNS] if headers else []
        table.print([*heading, *(job_row(job, wide=wide) for job in jobs)])


def _print_documents(jobs: list[JobView], *, single: bool, output: str) -> None:
    items = [job.document for job in jobs]
    document: dict[str, Any] = items[0] if single else {"apiVersion": "v1", "kind": "List", "items": items}
    text = json.dumps(document, indent=4) if output == "json" else yaml.safe_dump(document, sort_keys=False)
    print(text.rstrip("\n"), flush=True)


def _watch(arguments: argparse.Namespace, table: Table, seen: dict[str, dict[str, Any]]) -> None:
    """Print every job again that changed; ends with a named job that is deleted, else by Ctrl-C."""
    while True:
        time.sleep(WATCH_S)
        try:
            jobs = _jobs(arguments.job)
        except JobNotFoundError:
            return
        changed = [job for job in jobs if seen.get(job.name) != job.document]
        seen = {job.name: job.document for job in jobs}
        if changed:
            _print(changed, arguments, table, headers=False)
