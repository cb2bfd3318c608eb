import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from perfetto_rule import read_perfetto

from megatronapp_analyzer.cli import commands, fetch
from megatronapp_analyzer.errors import AnalyzerError, ExportError, HubError
from megatronapp_analyzer.hub.export.chrome import chrome_trace
from megatronapp_analyzer.hub.export.tracks import ARROW_CATEGORY, JOB_PROCESS, source_of, tracks_of
from megatronapp_analyzer.hub.ingest.ingest import TraceIngest
from megatronapp_analyzer.hub.ingest.ring_metadata import MAX_WORLD
from megatronapp_analyzer.hub.ingest.spool import SpoolLimits, SpoolWriter
from megatronapp_analyzer.hub.ingest.store import StoreLimits
from megatronapp_common import frames
from megatronapp_common.errors import OutputError
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.trace import Counter, Flag, PassFlag, RecordKind
from megatronapp_common.web.tokens import new_secret


@pytest.fixture
def ingest(step_rows: Any, ring_header: Any, rows: Any) -> TraceIngest:
    """Steps 0 to 2; in step 1 of rank 1 a fault, a copy and an early weight pass; a counter of worker 0."""
    filled = TraceIngest(StoreLimits())
    for rank in (0, 1):
        filled.add_ring(0, ring_header(rank))
    fault = {"kind": RecordKind.FAULT, "step": 1, "start_ns": 1_011_000_000, "duration": 1000, "flags": Flag.INJECTED}
    tasks = [
        {"kind": RecordKind.COPY, "comm": 0, "start_ns": 1_010_500_000, "duration": 1000, "aux": 8, "microbatch": 0},
        {"kind": RecordKind.WEIGHT, "start_ns": 1_019_100_000, "duration": 1000, "microbatch": 0},
    ]
    tasks = [
        task | {"step": 1, "flags": flags} for task, flags in zip(tasks, (Flag.AUX_BYTES, PassFlag.EARLY), strict=True)
    ]
    first = [0, 0]
    for step in range(3):
        for rank in (0, 1):
            parts = [rows([fault, *tasks])] if (rank, step) == (1, 1) else []
            for part in [*parts, step_rows(rank, step)]:
                header = {"rank": rank, "worker": rank, "first": first[rank], "lost": 0}
                filled.add_records(0, header, part.tobytes())
                first[rank] += len(part)
    half = {"kind": RecordKind.COUNTER, "comm": Counter.CPU_PRESSURE, "start_ns": 1_015_000_000, "aux": 0x3F000000}
    filled.add_records(0, {"rank": None, "worker": 0, "first": 0, "lost": 0}, rows([half]).tobytes())
    return filled


def export_all(ingest: TraceIngest, first: int | None = None, last: int | None = None) -> dict[str, Any]:
    steps = ingest.store.select(first, last, newest=50)
    return chrome_trace(tracks_of(source_of(ingest, "demo", steps)))


def events(document: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event["ph"] == phase]


def test_workers_are_processes_and_ranks_are_threads(ingest: TraceIngest) -> None:
    document = export_all(ingest)
    names = {
        (event["pid"], event.get("tid")): event["args"]["name"]
        for event in events(document, "M")
        if "name" in event["args"]
    }
    assert names[0, None] == "worker 0 on node-0"
    assert names[1, 1] == "rank 1 (pp 1, dp 0, tp 0) host"
    transfers = 1 + MAX_WORLD
    assert names[1, transfers] == "rank 1 (pp 1, dp 0, tp 0) transfers"
    assert {(event["pid"], event["tid"]) for event in events(document, "X")} == {(0, 0), (1, 1), (1, transfers)}
    json.dumps(document, allow_nan=False)


def test_spans_carry_times_and_what_they_mean(ingest: TraceIngest) -> None:
    spans = events(export_all(ingest, 1, 1), "X")
    forward = next(event for event in spans if event["name"] == "forward 0" and event["tid"] == 0)
    assert (forward["ts"], forward["dur"]) == (0.0, 3000.0)
    send = next(event for event in spans if event["name"] == "send_post")
    assert (send["args"]["bytes"], send["args"]["peer"], send["args"]["step"]) == (1024, 1, 1)
    fault = next(event for event in spans if event["cat"] == "fault")
    assert (fault["name"], fault["tid"], fault["args"]["injected"]) == ("fault", 1, True)


def test_copies_overlap_other_spans_and_early_passes_are_marked(ingest: TraceIngest) -> None:
    document = export_all(ingest, 1, 1)
    (copy,) = (event for event in events(document, "X") if event["cat"] == "copy")
    assert (copy["name"], copy["dur"], copy["args"]["bytes"], copy["args"]["peer"]) == ("copy 0", 8.0, 128, 0)
    early = [event["name"] for event in events(document, "X") if event["args"].get("early")]
    assert early == ["weight 0"]


def test_arrows_join_matched_ends(ingest: TraceIngest) -> None:
    document = export_all(ingest)
    starts, ends = events(document, "s"), events(document, "f")
    assert len(starts) == len(ends) == 6
    assert len({event["id"] for event in starts}) == 6
    for start, end in zip(starts, ends, strict=True):
        assert start["id"] == end["id"]
        assert start["tid"] != end["tid"]
        assert end["ts"] >= start["ts"]


def test_curves_and_counters_are_tracks(ingest: TraceIngest) -> None:
    tracks = {(event["name"], event["pid"]): event["args"]["value"] for event in events(export_all(ingest, 1, 1), "C")}
    assert tracks == {("loss", JOB_PROCESS): 5.0, ("cpu_pressure 0", 0): 0.5}


def test_no_steps_are_an_error(ingest: TraceIngest) -> None:
    with pytest.raises(ExportError, match="demo"):
        export_all(ingest, 100)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    commands.register(parser.add_subparsers())
    return parser.parse_args(arguments)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_rows: Any, ring_header: Any) -> Path:
    """State of a job that has ended, with stored traces."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "megatronapp" / "jobs" / "demo"
    folder.mkdir(parents=True)
    (folder / "secret").write_text(new_secret())
    writer = SpoolWriter(folder / "hub" / "traces", SpoolLimits())
    first = [0, 0]
    for rank in (0, 1):
        writer.append_ring(0, frames.encode(Frame(FrameType.RING, ring_header(rank))))
    for step in range(4):
        for rank in (0, 1):
            body = step_rows(rank, step)
            header = {"rank": rank, "worker": rank, "first": first[rank], "lost": 0}
            writer.append_records(0, frames.encode(Frame(FrameType.RECORDS, header, body.tobytes())))
            first[rank] += len(body)
    writer.close()
    return folder


def test_export_after_the_job_reads_the_stored_traces(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "trace.json"
    (job / "hub.json").write_text(json.dumps({"url": "http://127.0.0.1:9"}))
    arguments = parse(["trace", "export", "demo", "-o", str(target), "--from", "1", "--to", "2"])
    assert arguments.func(arguments) == 0
    document = json.loads(target.read_text())
    assert {event["args"]["step"] for event in events(document, "X")} == {1, 2}
    assert "stored traces" in capsys.readouterr().out
    assert list(tmp_path.glob("*.part")) == []


def test_export_of_a_verdict_as_protobuf(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {
        "id": "v1",
        "subject": {"ranks": [1]},
        "since": {"attempt": 0, "step": 1, "time": 0.0},
        "evidence": {"steps": [2]},
    }
    (job / "hub" / "verdicts.json").write_text(json.dumps([found]))
    target = tmp_path / "trace.pftrace"
    arguments = parse(["trace", "export", "demo", "-o", str(target), "--verdict", "v1"])
    assert arguments.func(arguments) == 0
    assert {values["step"] for values in read_perfetto(target.read_bytes()).arguments} == {0, 1, 2, 3}
    assert "0.00 MB, from the stored traces" in capsys.readouterr().out
    arguments = parse(["trace", "export", "demo", "-o", str(target), "--verdict", "v1", "--format", "chrome"])
    assert arguments.func(arguments) == 0
    spans = events(json.loads(target.read_text()), "X")
    assert len([span for span in spans if span["cat"] != ARROW_CATEGORY]) == 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["other"], 'megatronjobs.megatronapp.io "other" not found; "megatronapp get" lists the jobs'),
        (["../demo"], "not found"),
        (["demo", "--from", "90"], r"no steps 90 to the end are stored; take --from and --to between \d+ and \d+$"),
        (["demo", "--from", "2", "--to", "1"], "--to is before --from"),
        (["demo", "--verdict", "v9"], "job demo has no verdict 'v9'; its page or hub lists them"),
        (["demo", "--verdict", "v9", "--to", "1"], "--verdict chooses its own steps; leave out --from and --to"),
    ],
)
def test_export_explains_bad_arguments(job: Path, tmp_path: Path, options: list[str], message: str) -> None:
    arguments = parse(["trace", "export", *options, "-o", str(tmp_path / "trace.json")])
    with pytest.raises(AnalyzerError, match=message):
        arguments.func(arguments)
    assert not (tmp_path / "trace.json").exists()


def test_the_traces_of_an_ended_job_are_archived_and_exported_as_before(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exporting = parse(["trace", "export", "demo", "-o", str(tmp_path / "trace.json"), "--from", "1", "--to", "2"])
    exporting.func(exporting)
    before = json.loads((tmp_path / "trace.json").read_text())
    capsys.readouterr()
    archiving = parse(["trace", "archive", "demo"])
    archiving.func(archiving)
    assert "44 records in 1 files" in capsys.readouterr().out
    assert list((job / "hub" / "traces").glob("*/records-*")) == []
    exporting.func(exporting)
    assert json.loads((tmp_path / "trace.json").read_text()) == before
    absent = parse(["trace", "export", "demo", "-o", str(tmp_path / "none.json"), "--from", "7", "--to", "9"])
    with pytest.raises(ExportError, match="take --from and --to between 0 and 3"):
        absent.func(absent)


def test_traces_of_a_running_job_are_not_archived_twice(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "has_hub", lambda folder: folder == job)
    archiving = parse(["trace", "archive", "demo"])
    with pytest.raises(ExportError, match="is running and archives by itself"):
        archiving.func(archiving)
    assert list((job / "hub" / "traces").glob("*/records-*")) != []


def test_unwritable_output_is_reported(job: Path, tmp_path: Path) -> None:
    arguments = parse(["trace", "export", "demo", "-o", str(tmp_path / "none" / "trace.json")])
    with pytest.raises(OutputError, match="cannot write"):
        arguments.func(arguments)


def test_garbled_hub_address_is_reported(job: Path) -> None:
    (job / "hub.json").write_text("[]")
    with pytest.raises(HubError, match=r"hub\.json"):
        fetch.from_hub(job, fetch.TraceRequest())


@pytest.mark.parametrize("step", ["x", "1.5", "1e3"])
def test_steps_are_whole_numbers(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["trace", "export", "demo", "-o", "f", "--from", step])
    assert "is not a step" in capsys.readouterr().err
