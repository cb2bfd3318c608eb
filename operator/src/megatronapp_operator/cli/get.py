"""`megatronapp get` for jobs of this machine."""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from megatronapp_common.job import manifest_text
from megatronapp_common.text.terminal import to_single_line
from megatronapp_operator.backends.process.state import registry
from megatronapp_operator.cli.jobs import JobHandle, JobLookup
from megatronapp_operator.cli.text.tables import COLUMNS, WIDE_COLUMNS, Table, job_row
from megatronapp_operator.errors import JobNotFoundError

WATCH_S = 0.5


def main(arguments: argparse.Namespace) -> int:
    """Print one job or all of this machine; return the exit code."""
    return show(registry, arguments)


def show(place: JobLookup, arguments: argparse.Namespace, *, watch_s: float = WATCH_S, namespaces: bool = False) -> int:
    """Print one job or all jobs of `place`, with a column for namespaces if `namespaces`; return the exit code."""
    jobs = _jobs(place, arguments.job)
    if not jobs and not arguments.watch:
        if arguments.output in {"json", "yaml"}:
            _print_documents(jobs, single=False, output=arguments.output)
        else:
            print("No jobs found.", file=sys.stderr)
        return 0
    printer = _Printer(arguments, namespaces=namespaces)
    printer.print(jobs, headers=not arguments.no_headers)
    if arguments.watch:
        _watch(place, arguments, printer, watch_s, {_key(job): job.document for job in jobs})
    return 0


def _jobs(place: JobLookup, name: str | None) -> Sequence[JobHandle]:
    return place.views() if name is None else [place.view(name)]


def _key(job: JobHandle) -> tuple[str, str]:
    return str(job.document["metadata"].get("namespace")), job.name


class _Printer:
    def __init__(self, arguments: argparse.Namespace, *, namespaces: bool) -> None:
        self._arguments = arguments
        self._namespaces = namespaces
        self._table = Table()

    def print(self, jobs: Sequence[JobHandle], *, headers: bool) -> None:
        """Print jobs in the selected format."""
        output = self._arguments.output
        if output in {"json", "yaml"}:
            _print_documents(jobs, single=self._arguments.job is not None, output=output)
        elif output == "name":
            print(
                "".join(f"megatronjob.megatronapp.io/{to_single_line(job.name)}\n" for job in jobs), end="", flush=True
            )
        else:
            self._table.print(self._rows(jobs, wide=output == "wide", headers=headers))

    def _rows(self, jobs: Sequence[JobHandle], *, wide: bool, headers: bool) -> Iterator[Sequence[str]]:
        if headers:
            yield self._row("NAMESPACE", WIDE_COLUMNS if wide else COLUMNS)
        for job in jobs:
            yield self._row(_key(job)[0], job_row(job, wide=wide))

    def _row(self, namespace: str, cells: Sequence[str]) -> Sequence[str]:
        return [namespace, *cells] if self._namespaces else cells


def _print_documents(jobs: Sequence[JobHandle], *, single: bool, output: str) -> None:
    items = [job.document for job in jobs]
    document: dict[str, Any] = items[0] if single else {"apiVersion": "v1", "kind": "List", "items": items}
    text = json.dumps(document, indent=4) if output == "json" else manifest_text(document)
    print(text.rstrip("\n"), flush=True)


def _watch(
    place: JobLookup, arguments: argparse.Namespace, printer: _Printer, every_s: float, seen: dict[tuple[str, str], Any]
) -> None:
    """Print every job again that changed, until a named job is deleted or Ctrl-C."""
    while True:
        time.sleep(every_s)
        try:
            jobs = _jobs(place, arguments.job)
        except JobNotFoundError:
            return
        changed = [job for job in jobs if seen.get(_key(job)) != job.document]
        seen = {_key(job): job.document for job in jobs}
        if changed:
            printer.print(changed, headers=False)
