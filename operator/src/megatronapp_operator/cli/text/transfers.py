"""Transfers between the ranks of a job, as its hub has measured them, and their texts."""

import argparse
import dataclasses
import json
import sys
from typing import Any

from megatronapp_operator.cli.text.tables import NONE, Table
from megatronapp_operator.errors import HubError, OperatorError

HEADINGS = ("FROM", "TO", "PATH", "MESSAGES/STEP", "KIB/MESSAGE", "COPY MS", "GB/S")
_OF_OWN_RANKS = ("ranks", "sizes", "rounds", "gloo")
"""Options of a bench that starts ranks itself."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PairTransfers:
    """Messages from one rank to another by one path, over all steps that were summed."""

    source: int
    destination: int
    path: str
    messages: int
    bytes: int
    copy_seconds: float
    """Sum of the times of their copies, which may overlap."""

    @property
    def mean_copy_seconds(self) -> float:
        """Return the mean time of a copy: what a message takes once it has been sent."""
        return self.copy_seconds / self.messages

    @property
    def bytes_per_second(self) -> float | None:
        """Return bytes over the time of copies; None if that is below the clock's resolution."""
        return self.bytes / self.copy_seconds if self.copy_seconds > 0 else None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobTransfers:
    """Transfers of a job's newest steps."""

    job: str
    attempt: int
    steps: int
    pairs: tuple[PairTransfers, ...]

    def document(self) -> dict[str, Any]:
        """Return the transfers for programs, sums over `steps` steps."""
        pairs = [
            {
                "from": pair.source,
                "to": pair.destination,
                "path": pair.path,
                "messages": pair.messages,
                "bytes": pair.bytes,
                "meanCopySeconds": pair.mean_copy_seconds,
                "bytesPerSecond": pair.bytes_per_second,
            }
            for pair in self.pairs
        ]
        return {"job": self.job, "attempt": self.attempt, "steps": self.steps, "pairs": pairs}

    def table(self) -> str:
        """Return a line for each pair and path."""
        return Table().format([HEADINGS, *(_cells(pair, self.steps) for pair in self.pairs)])


def refuse_other_options(arguments: argparse.Namespace) -> None:
    """Refuse the options of ranks that the bench starts. Raises OperatorError."""
    for name in _OF_OWN_RANKS:
        if getattr(arguments, name) != arguments.bench_defaults[name]:
            raise OperatorError(
                f"--{name} is for ranks that the bench starts itself, and --job shows those of a job; leave one out"
            )


def read_transfers(name: str, document: Any) -> JobTransfers:  # noqa: ANN401 - JSON
    """Read a hub's answer. Raises HubError if it is none, or has no transfers."""
    try:
        found = JobTransfers(
            job=name,
            attempt=int(document["attempt"]),
            steps=int(document["transferSteps"]),
            pairs=tuple(
                PairTransfers(
                    source=int(pair["source"]),
                    destination=int(pair["destination"]),
                    path=str(pair["path"]),
                    messages=int(pair["transfers"]),
                    bytes=int(pair["bytes"]),
                    copy_seconds=float(pair["copySeconds"]),
                )
                for pair in document["transfers"]
                if int(pair["transfers"]) > 0
            ),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise HubError(f"{name}: the job's hub did not answer with transfers; is it of another release?") from error
    if found.steps <= 0:
        raise HubError(
            f"{name}: no whole step is traced yet; try again after the first steps of an attempt. Steps are traced "
            "with spec.trace.enabled: true"
        )
    if not found.pairs:
        raise HubError(
            f"{name}: its ranks send nothing over the native transport, so that there is nothing to show; it is used "
            "with spec.dpp.enabled: true, or with --transport native in spec.args"
        )
    return found


def print_transfers(found: JobTransfers, *, as_json: bool) -> None:
    """Print a table with a line about it, or one JSON object."""
    if as_json:
        print(json.dumps(found.document()))
        return
    sys.stdout.write(found.table())
    steps = "step" if found.steps == 1 else "steps"
    print(
        f"{found.job}: the newest {found.steps} traced {steps} of attempt {found.attempt}; GB/S is bytes over the time "
        "of copies, which may overlap"
    )


def _cells(pair: PairTransfers, steps: int) -> tuple[str, ...]:
    rate = NONE if pair.bytes_per_second is None else f"{1e-9 * pair.bytes_per_second:.2f}"
    return (
        str(pair.source),
        str(pair.destination),
        pair.path,
        f"{pair.messages / steps:g}",
        f"{pair.bytes / pair.messages / 1024:.1f}",
        f"{1e3 * pair.mean_copy_seconds:.3f}",
        rate,
    )
