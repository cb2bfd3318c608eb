"""The text that `megatronapp whatif` prints."""

from collections.abc import Iterator, Mapping

from megatronapp_analyzer.whatif.analysis import WhatIfResult

_MOST_ROWS = 12
"""Rows of a breakdown, the largest slowdowns first."""


def text(result: WhatIfResult) -> str:
    """Describe the result in lines."""
    return "\n".join(_lines(result))


def _lines(result: WhatIfResult) -> Iterator[str]:
    lost_s = result.recorded_s - result.ideal_s
    yield f"{result.operations} operations in {len(result.step_slowdowns)} steps{_skipped(result)}"
    yield f"a step took {result.recorded_s:.3f} s; with usual durations it takes {result.ideal_s:.3f} s"
    yield f"slowdown S           {result.slowdown:.4f}   ({lost_s:.3f} s of each step are lost)"
    workers = ", ".join(map(str, result.slowest_workers))
    yield f"slowest workers M_W  {_fraction(result.worker_fraction)}   (workers {workers})"
    yield f"last stage M_S       {_fraction(result.last_stage_fraction)}"
    yield f"launch delays        {result.launch_ratio:.4f}"
    for title, values in (
        ("data-parallel rank", result.by_dp_rank.overall),
        ("stage", result.by_stage.overall),
        ("operation", result.by_type.overall),
    ):
        yield from _table(f"slowdown by {title}", values)
    steps = {str(step): slowdown for step, slowdown in result.step_slowdowns.items()}
    yield from _table("slowdown by step", dict(sorted(steps.items(), key=lambda item: -item[1])))


def _fraction(value: float | None) -> str:
    return "   -  " if value is None else f"{value:.4f}"


def _skipped(result: WhatIfResult) -> str:
    if not result.skipped_steps:
        return ""
    return f"; {len(result.skipped_steps)} steps with missing, repeated or other records were left out"


def _table(title: str, values: Mapping[str, float]) -> Iterator[str]:
    yield ""
    yield title
    for name, slowdown in list(values.items())[:_MOST_ROWS]:
        yield f"  {name:28} {slowdown:.4f}"
    if len(values) > _MOST_ROWS:
        yield f"  and {len(values) - _MOST_ROWS} more; --json prints all"
