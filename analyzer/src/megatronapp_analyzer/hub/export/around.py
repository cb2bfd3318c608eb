"""The part of a job's trace that shows a verdict: its newest evidence, in a file of about one megabyte."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatronapp_analyzer.errors import ExportError
from megatronapp_analyzer.hub.ingest.store import StepStore, StoredStep
from megatronapp_analyzer.model import StepRecords

SLICE_BYTES = 1 << 20
"""Size that a part of a trace has at most, by the usual size of a span."""


def steps_around(store: StepStore, verdict: Mapping[str, Any], most_spans: int) -> list[StoredStep]:
    """Return steps around the newest evidence of a verdict, oldest first, with `most_spans` records or few more.

    If the ranks of one step have too many, those of the verdict and those that communicate with them have priority.
    `verdict` is one in the form of the contract. Raises ExportError if no step of its attempt is stored in full.
    """
    attempt, since = int(verdict["since"]["attempt"]), int(verdict["since"]["step"])
    stored = [step for step in store.select(0, None, newest=0) if step.view.attempt == attempt]
    if not stored:
        raise ExportError(
            f"verdict {verdict['id']}: no step of attempt {attempt} is stored any more; export newer steps with --from"
        )
    evidence = set(verdict["evidence"]["steps"])
    numbers = [step.view.step for step in stored]
    shown = [number for number in numbers if number in evidence]
    middle = max(shown) if shown else min(numbers, key=lambda number: abs(number - since))
    ranks = _ranks_near(stored[numbers.index(middle)].view, verdict["subject"]["ranks"], most_spans)
    chosen: list[StoredStep] = []
    left = most_spans
    for step in sorted(stored, key=lambda step: (step.view.step not in evidence, abs(step.view.step - middle))):
        part = step if ranks is None else _only(step, ranks)
        left -= len(part.view.records)
        if chosen and left < 0:
            break
        if len(part.view.records):
            chosen.append(part)
    return sorted(chosen, key=lambda step: step.view.step)


def _ranks_near(view: StepRecords, subject: Sequence[int], most_spans: int) -> frozenset[int] | None:
    """Return the ranks to show, the subject's always; None for all."""
    counts = np.bincount(view.records["rank"])
    if counts.sum() <= most_spans:
        return None
    related = {
        member
        for rank in subject
        for communicator in view.comms.get(rank, {}).values()
        for member in communicator.members
    }
    order = [*subject, *sorted(related - set(subject)), *range(len(counts))]
    chosen: set[int] = set()
    left = most_spans
    for rank in order:
        if rank in chosen or rank >= len(counts):
            continue
        left -= int(counts[rank])
        if left < 0 and rank not in subject:
            break
        chosen.add(rank)
    return frozenset(chosen)


def _only(step: StoredStep, ranks: frozenset[int]) -> StoredStep:
    records = step.view.records
    chosen = records[np.isin(records["rank"], sorted(ranks))]
    return dataclasses.replace(step, view=dataclasses.replace(step.view, records=chosen))
