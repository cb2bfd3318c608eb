"""Sums over whole steps for Prometheus: cost of tracing, uneven data, ranks that make others wait. Pure NumPy."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.graph import waits
from megatronapp_analyzer.graph.matched_step import MatchedStep
from megatronapp_analyzer.hub.ingest.digest import durations_ns, is_kind, run_queue_ns
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_analyzer.model import RankRecords, copy_rows, select_rows
from megatronapp_common.trace import RecordKind

LEAST_PASSES = 32
"""Number of forward and backward pairs below which a correlation has no meaning."""


def overhead_ratio(steps: Iterable[StoredStep], cost_ns: Mapping[int, float]) -> float | None:
    """Return the cost of records over the length of the step, median of the steps, of the rank where it is largest.

    `cost_ns` is what a record costs each rank, as it measured when it began. None without such a rank and a step.
    """
    ratios = [_overhead(step.view.records, cost_ns) for step in steps]
    known = [ratio for ratio in ratios if ratio is not None]
    return float(np.median(known)) if known else None


def _overhead(records: RankRecords, cost_ns: Mapping[int, float]) -> float | None:
    own = select_rows(records, is_kind(records, (RecordKind.STEP,)))
    count = np.bincount(records["rank"])
    lengths = zip(own["rank"].tolist(), durations_ns(own).tolist(), strict=True)
    ratios = [count[rank] * cost_ns[rank] / length for rank, length in lengths if rank in cost_ns and length > 0]
    return float(max(ratios)) if ratios else None


def skew_correlation(steps: Iterable[StoredStep], left_out: Collection[int]) -> float | None:
    """Return the correlation of forward and backward times over microbatches of each rank and step; None with too few.

    Deviations are from the mean of the rank in the step, so that neither a slow rank nor a slow step makes one; ranks
    in `left_out` are omitted. Near 1 where some microbatches hold more work than others.
    """
    pairs = [_deviations(step.view.records, left_out) for step in steps]
    table = np.concatenate([np.empty((0, 2)), *pairs])
    if len(table) < LEAST_PASSES or not table.any(axis=0).all():
        return None
    return float(np.corrcoef(table.T)[0, 1])


def _deviations(records: RankRecords, left_out: Collection[int]) -> NDArray[np.float64]:
    """Return [n, 2] forward and backward seconds of a step less their rank's mean, without ranks that lack a pass."""
    compared = is_kind(records, (RecordKind.FORWARD, RecordKind.BACKWARD))
    spans = records[compared & ~np.isin(records["rank"], list(left_out))]
    seconds = np.maximum(durations_ns(spans) - run_queue_ns(spans), 0) * 1e-9
    key = (spans["rank"].astype(np.int64) << 32) | (spans["chunk"].astype(np.int64) << 16) | spans["microbatch"]
    names, row = np.unique(key, return_inverse=True)
    table = np.full((len(names), 2), np.nan)
    table[row, (spans["kind"] == RecordKind.BACKWARD).astype(np.int64)] = seconds
    group = np.unique(names >> 16, return_inverse=True)[1]
    size = np.bincount(group)
    sums = np.stack([np.bincount(group, weights=column) for column in table.T], axis=1) if len(names) else table
    deviations: NDArray[np.float64] = table - (sums / np.maximum(size, 1)[:, None])[group] if len(names) else table
    kept: NDArray[np.float64] = deviations[np.isfinite(deviations).all(axis=1)]
    return kept


def imposed_s(step: StoredStep, matched: MatchedStep | None = None) -> dict[tuple[int, str], float]:
    """Return how long each rank made others wait in this step, by kind of communicator, on the clocks of the store.

    `matched`: the same step, if its spans are matched already.
    """
    records = copy_rows(step.view.records)
    starts = records["start_ns"].astype(np.int64) + step.offsets_ns[records["rank"]]
    records["start_ns"] = np.maximum(starts, 0).astype(np.uint64)
    moved = dataclasses.replace(step.view, records=records)
    return waits.imposed_s(MatchedStep(moved) if matched is None else matched.on_other_clocks(moved))
