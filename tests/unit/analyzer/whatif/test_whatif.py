"""The what-if analysis reproduces published results, and finds the faults of pipelines that have known ones."""

import json
import math
import os
import pathlib
from collections.abc import Callable

import numpy as np
import pyarrow
import pytest
from interleaved_pipeline import InterleavedPipeline
from pyarrow import parquet
from recorded_pipeline import RecordedPipeline, step_seconds

from megatronapp_analyzer.errors import WhatIfError
from megatronapp_analyzer.whatif.analysis import Idealise, WhatIfResult, analyze
from megatronapp_analyzer.whatif.recording import read_parquet
from megatronapp_common.cli import main

_DEFAULT = pathlib.Path(__file__).parents[5] / "shared" / "data"
DATA = pathlib.Path(os.environ.get("MEGATRONAPP_TEST_DATA", _DEFAULT)) / "straggler"
SLOW = 4.0


@pytest.fixture
def analyzed(tmp_path: pathlib.Path) -> Callable[..., WhatIfResult]:
    def analyzed(table: pyarrow.Table, idealise: Idealise = Idealise.POOLED) -> WhatIfResult:
        parquet.write_table(table, tmp_path / "trace.parquet")
        return analyze(read_parquet(tmp_path / "trace.parquet"), idealise)

    return analyzed


def slow_worker(replica: int, stage: int, _step: int, kind: str) -> float:
    """Worker 2 (replica 1, stage 0) computes four times as long."""
    return (1.0 if kind == "forward" else 2.0) * (SLOW if (replica, stage) == (1, 0) else 1)


def heavy_stage(_replica: int, stage: int, _step: int, kind: str) -> float:
    return (1.0 if kind == "forward" else 2.0) * (1.5 if stage == 1 else 1)


@pytest.mark.skipif(not (DATA / "trace-AR.parquet").is_file(), reason=f"no public trace in {DATA}")
def test_published_results_are_reproduced() -> None:
    """Table of the artifact of OSDI 2025; the tolerance is that of single precision in the published step times."""
    found = json.loads(json.dumps(analyze(read_parquet(DATA / "trace-AR.parquet")).document()))
    published = json.loads((DATA / "result-AR.json").read_text())
    assert found["S"] == pytest.approx(published["blocking_slowdown"], rel=1e-9)
    assert found["launch_ratio"] == pytest.approx(published["launch_slowdown"], rel=1e-6)
    assert found["M_W"] == pytest.approx(json.loads((DATA / "mw-AR.json").read_text())["Mw"], rel=1e-9)
    assert found["M_S"] == pytest.approx(json.loads((DATA / "ms-AR.json").read_text())["Ms"], rel=1e-9)
    assert found["by_step"] == pytest.approx(published["blocking_step_slowdown"], rel=1e-9)
    assert found["launch_ratio_by_step"] == pytest.approx(published["launch_step_slowdown"], rel=1e-6)
    for name, its_name in (("dp_rank", "dp_rank"), ("stage", "stage"), ("type", "optype")):
        of_parts = f"blocking_decompose_by_{its_name}"
        assert found[f"by_{name}"] == pytest.approx(published[of_parts], rel=1e-9)
        per_step = published[f"{of_parts}_per_step"]
        assert found[f"by_{name}_per_step"].keys() == per_step.keys()
        for step, values in found[f"by_{name}_per_step"].items():
            assert values == pytest.approx(per_step[step], rel=1e-9)
    assert found["slowest_workers"] == [0]


@pytest.mark.parametrize("unit_s", [1, 0.1])
@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_equal_workers_lose_nothing(analyzed: Callable[..., WhatIfResult], microbatches: int, unit_s: float) -> None:
    """The replay of the recorded durations gives the recorded times, and these are the ideal ones.

    Multiples of 0.1 s are rounded: what is lost by that has no parts.
    """
    table = scaled(RecordedPipeline(microbatches=microbatches).table(), unit_s)
    found = analyzed(table)
    assert found.launch_ratio == pytest.approx(1, rel=1e-6)
    assert found.slowdown == pytest.approx(1, rel=1e-6)
    assert found.recorded_s == pytest.approx(step_seconds(table).mean(), rel=1e-6)
    assert found.worker_fraction is found.last_stage_fraction is None


@pytest.mark.parametrize(
    "pipeline",
    [
        InterleavedPipeline(stages=3, microbatches=5),
        InterleavedPipeline(stages=2, chunks=2, overlapped=True),
        InterleavedPipeline(stages=3, chunks=3, microbatches=6, overlapped=True),
        InterleavedPipeline(stages=2, chunks=2, unlaunched=True),
    ],
)
def test_recorded_times_are_replayed_whatever_delayed_an_operation(
    analyzed: Callable[..., WhatIfResult], pipeline: InterleavedPipeline
) -> None:
    """All times are random, so that in some step each rule of the pattern is what an operation waits for."""
    table = pipeline.table()
    found = analyzed(table)
    assert list(found.step_launch_ratios.values()) == [1] * len(pipeline.steps)
    assert found.recorded_s == step_seconds(table).mean()


def test_equal_work_is_that_of_a_stage_and_a_chunk(analyzed: Callable[..., WhatIfResult]) -> None:
    table = InterleavedPipeline(chunks=2, random=False).table()
    assert analyzed(table, Idealise.WORK).slowdown == 1
    assert analyzed(table).slowdown != 1


def scaled(table: pyarrow.Table, factor: float, shift_s: float = 0) -> pyarrow.Table:
    """Return the table in other units of time, and with another zero, in double precision."""
    starts, durations = (table[name].to_numpy().astype(np.float64) * factor for name in ("start_ts", "duration"))
    table = table.set_column(table.schema.get_field_index("start_ts"), "start_ts", pyarrow.array(starts + shift_s))
    return table.set_column(table.schema.get_field_index("duration"), "duration", pyarrow.array(durations))


def test_starts_may_be_times_of_the_day(analyzed: Callable[..., WhatIfResult]) -> None:
    table = RecordedPipeline(pass_s=slow_worker).table()
    assert analyzed(scaled(table, 1, 1.7e9)).document() == analyzed(table).document()


def test_a_slow_worker_is_named_with_all_of_the_loss(analyzed: Callable[..., WhatIfResult]) -> None:
    table = RecordedPipeline(pass_s=slow_worker).table()
    found = analyzed(table)
    usual = RecordedPipeline(pass_s=lambda *arguments: slow_worker(*arguments) * (1 + 3 / 4) / _slowness(*arguments))
    assert found.recorded_s == step_seconds(table).mean()
    assert found.ideal_s == step_seconds(usual.table()).mean(), "a mean of four workers"
    assert found.slowest_workers == (2,)
    assert found.worker_fraction is not None
    assert found.worker_fraction >= 1, "the others are faster than the mean"
    assert next(iter(found.by_dp_rank.overall)) == "1"
    assert next(iter(found.by_stage.overall)) == "0"


def _slowness(replica: int, stage: int, _step: int, _kind: str) -> float:
    return SLOW if (replica, stage) == (1, 0) else 1


def test_a_stage_with_more_work_is_slow_only_if_all_work_is_pooled(analyzed: Callable[..., WhatIfResult]) -> None:
    table = RecordedPipeline(pass_s=heavy_stage).table()
    pooled = analyzed(table)
    assert pooled.slowdown > 1
    assert next(iter(pooled.by_stage.overall)) == "1"
    assert analyzed(table, Idealise.WORK).slowdown == 1


def test_steps_with_missing_or_repeated_records_are_skipped(analyzed: Callable[..., WhatIfResult]) -> None:
    table = RecordedPipeline(steps=(1, 2, 3, 4, 5)).table()
    of_step = {step: np.flatnonzero(table["step"].to_numpy() == step) for step in (2, 4)}
    rows = [row for row in range(table.num_rows) if row != of_step[2][7]]  # one is missing, one is there twice
    found = analyzed(table.take([*rows, int(of_step[4][3])]))
    assert found.skipped_steps == (2, 4)
    assert list(found.step_slowdowns) == [1, 3, 5]


def test_a_truncated_step_is_not_the_model_of_whole_ones(analyzed: Callable[..., WhatIfResult]) -> None:
    table = RecordedPipeline(steps=(1, 2)).table()
    kinds, steps = np.array(table["optype"].to_pylist()), table["step"].to_numpy()
    found = analyzed(table.filter(pyarrow.array(~((steps == 1) & np.isin(kinds, ["optimizer", "gc"])))))
    assert (found.skipped_steps, list(found.step_slowdowns)) == ((1,), [2])


def test_transfers_that_were_never_launched_cost_nothing(analyzed: Callable[..., WhatIfResult]) -> None:
    table = RecordedPipeline().table()
    rows = [row for row, kind in enumerate(table["optype"].to_pylist()) if kind == "forward-recv"]
    last = table.take([row for row in rows if table["seq_id"][row].as_py() == 2])
    number = pyarrow.array([3] * len(last), table.schema.field("seq_id").type)
    after = last.set_column(last.schema.get_field_index("seq_id"), "seq_id", number)
    starts = np.full(len(last), 100, dtype=np.float32)
    after = after.set_column(after.schema.get_field_index("start_ts"), "start_ts", pyarrow.array(starts))
    found = analyzed(pyarrow.concat_tables([table, after]))
    assert found.slowdown == 1
    assert found.recorded_s == step_seconds(table).mean()


def test_traces_that_do_not_fit_are_refused(analyzed: Callable[..., WhatIfResult], tmp_path: pathlib.Path) -> None:
    table = RecordedPipeline().table()
    with pytest.raises(WhatIfError, match=r"no column gmc \(chunk in the whole model"):
        analyzed(table.drop_columns("gmc"))
    for name, row, value, problem in (
        ("duration", 5, math.nan, "duration of row 5 is nan; it must be a number of seconds from 0 on"),
        ("duration", 6, -1.0, "duration of row 6 is -1.0"),
        ("start_ts", 7, math.inf, "start_ts of row 7 is inf"),
        ("seq_id", 8, -1, r"seq_id .* of row 8 is -1; it must be a whole number from 0 to 1048575"),
        ("seq_id", 8, 1 << 40, r"seq_id .* of row 8 is 1099511627776"),
        ("dp_rank", 9, 3, "has rows of dp_rank 3, and none of dp_rank 2"),
        ("rank", 9, 7, "has rank .* in some rows and another one in others"),
        ("mc", 0, -1, "some forward-compute or backward-compute has no chunk"),
        ("gmc", 0, 9, "gmc .* is up to 9, and by mc and stage there are 2 chunks"),
    ):
        with pytest.raises(WhatIfError, match=problem):
            analyzed(replaced(table, name, row, value))
    with pytest.raises(WhatIfError, match=r"column step .* is of type string; it must hold numbers"):
        analyzed(table.set_column(table.schema.get_field_index("step"), "step", pyarrow.array(["3"] * len(table))))
    with pytest.raises(WhatIfError, match="4 workers have rank 0"):
        analyzed(table.set_column(table.schema.get_field_index("rank"), "rank", pyarrow.array([0] * len(table))))
    with pytest.raises(WhatIfError, match="with usual durations a step takes no time"):
        analyzed(scaled(table, 0))
    with pytest.raises(WhatIfError, match="has no rows"):
        analyzed(table.slice(0, 0))
    kinds = np.array(table["optype"].to_pylist(), dtype=object)
    other = np.where(kinds == "gc", "tea-break", kinds)
    with pytest.raises(WhatIfError, match="kind tea-break are not known"):
        analyzed(table.set_column(3, "optype", pyarrow.array(other)))
    passes = table.filter(pyarrow.array([not kind.endswith(("send", "recv")) for kind in kinds]))
    with pytest.raises(WhatIfError, match="stage 0 has 0 operations forward-send for 3 passes"):
        analyzed(passes)
    without = table.filter(pyarrow.array(~((kinds == "forward-recv") & (table["seq_id"].to_numpy() == 2))))
    with pytest.raises(WhatIfError, match="stage 0 has 3 operations forward-send to stage 1, which has 2"):
        analyzed(without)
    (tmp_path / "text.parquet").write_text("no columns")
    with pytest.raises(WhatIfError, match=r"text\.parquet is no Parquet file"):
        read_parquet(tmp_path / "text.parquet")
    with pytest.raises(WhatIfError, match="cannot be read"):
        read_parquet(tmp_path / "absent.parquet")


def replaced(table: pyarrow.Table, name: str, row: int, value: float) -> pyarrow.Table:
    """Return the table with another value in a row."""
    values = table[name].to_pylist()
    values[row] = value
    return table.set_column(table.schema.get_field_index(name), name, pyarrow.array(values))


def test_the_command_prints_text_or_json(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.parquet"
    parquet.write_table(RecordedPipeline(pass_s=slow_worker).table(), path)
    assert main(["whatif", str(path)]) == 0
    assert "slowest workers M_W" in capsys.readouterr().out
    assert main(["whatif", str(path), "--json", "--idealise", "work"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["slowest_workers"] == [2]
    assert document["idealise"] == "work"
    assert {"S", "M_W", "M_S", "launch_ratio", "by_dp_rank", "by_stage", "by_type", "by_step"} <= document.keys()
    assert main(["whatif", str(tmp_path / "absent.parquet")]) == 1
    assert "absent.parquet cannot be read: there is no such file; give a Parquet file" in capsys.readouterr().err
