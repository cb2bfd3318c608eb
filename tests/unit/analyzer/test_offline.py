"""Import of other tools' traces, and the detector over recorded steps, from the command line."""

import dataclasses
import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatronapp_traces import MS, MegatronAppJob
from perfetto_rule import dropped, read_chrome
from profiled_job import ProfiledJob

from megatronapp_analyzer.errors import ImportTraceError
from megatronapp_analyzer.graph.matching import match_messages
from megatronapp_analyzer.hub.export.chrome import chrome_trace
from megatronapp_analyzer.hub.export.tracks import source_of, tracks_of
from megatronapp_analyzer.offline.analyze import analyze, text_lines
from megatronapp_analyzer.offline.job import RecordedJob
from megatronapp_analyzer.offline.read import read_traces
from megatronapp_analyzer.offline.stored import ingest_of
from megatronapp_common.cli import main
from megatronapp_common.trace import DURATION_UNIT_NS, RECORD, Counter, RecordKind

SLOW_RANK = 4
"""Replica 0 of the second stage, with four replicas."""


def slow_later(replica: int, stage: int, iteration: int) -> float:
    return 1.5 if (replica, stage) == (0, 1) and iteration >= 25 else 1.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of a small healthy job."""
    found = tmp_path / "trace_output"
    found.mkdir()
    MegatronAppJob().write(found)
    return found


@pytest.fixture(scope="module")
def slow_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a job of eight ranks, of which one becomes slow."""
    found = tmp_path_factory.mktemp("slow")
    MegatronAppJob(replicas=4, iterations=50, slowness=slow_later).write(found)
    return found


def spans(job: RecordedJob, rank: int, kind: RecordKind, step: int) -> list[tuple[int, int]]:
    records = next(found.records for found in job.ranks if found.rank == rank)
    rows = np.sort(records[(records["kind"] == kind) & (records["step"] == step)], order="start_ns")
    lengths = rows["duration"].astype(np.int64) * DURATION_UNIT_NS
    return list(zip(rows["start_ns"].tolist(), (rows["start_ns"].astype(np.int64) + lengths).tolist(), strict=True))


def test_scopes_of_megatronapp_are_passes_messages_and_collectives(folder: Path) -> None:
    job = read_traces([folder])
    marks = json.loads((folder / "benchmark-data-1-pipeline-0-tensor-0.json").read_text())
    ends = [mark["rel_ts"] for mark in marks if (mark["name"], mark["ph"]) == ("iteration", "E")]
    begin_ns = max_wall(folder, 0) + 50 * MS
    assert job.layout == {"tensor": 1, "pipeline": 2, "data": 2, "virtualPipeline": 1}
    ((start, end),) = spans(job, 1, RecordKind.STEP, 1)
    assert start == begin_ns
    assert 0 <= begin_ns + ends[1] - end < DURATION_UNIT_NS
    forwards = [mark["rel_ts"] for mark in marks if mark["name"].startswith("forward") and mark["ph"] == "B"]
    assert [span[0] - begin_ns for span in spans(job, 1, RecordKind.FORWARD, 1)] == forwards[3:6]
    assert len(spans(job, 1, RecordKind.BACKWARD, 1)) == 3
    steps = ingest_of(job).store.newest(9)
    assert [step.view.step for step in steps] == [0, 1, 2]
    messages = match_messages(steps[1].view.records, steps[1].view.comms)
    assert len(messages) == 12, "three each way in both replicas"
    assert messages.matched.all()
    assert job.notes == ["60 spans inside passes are skipped (60 transformer_layer)"]


def test_verdicts_of_stored_traces_have_reasons_and_are_printed_with_them(slow_folder: Path) -> None:
    """Each rank has a separate worker here, with a device that the launcher would read."""
    ingest = ingest_of(read_traces([slow_folder]))
    (state,) = ingest.attempts.values()
    for rank, ring in list(state.rings.items()):
        state.rings[rank] = dataclasses.replace(ring, worker=rank, device="cuda:0")
        times = np.sort([digest.start_real_ns - ring.real_offset_ns for digest in ingest.store.digests(None, None)])
        samples = np.zeros(len(times), RECORD)
        samples["kind"], samples["comm"], samples["start_ns"] = RecordKind.COUNTER, Counter.GPU_SM_CLOCK_MHZ, times
        is_low = (np.arange(len(times)) >= 25) & (rank == SLOW_RANK)
        samples["aux"] = np.where(is_low, 1300.0, 1980.0).astype("<f4").view("<u4")
        ingest.counter_history.add(0, rank, samples)
    found = analyze(ingest, source="here", notes=())
    assert [verdict["reason"] for verdict in found.verdicts] == ["down-clock"]
    assert any(line.startswith("  cause compute (down-clock), since step") for line in text_lines(found))
    assert "  - SM clock 1.30 GHz, 1.98 GHz on the other 7 devices, 1.98 GHz before" in list(text_lines(found))


def max_wall(folder: Path, iteration: int) -> int:
    """Return how long an iteration lasted on the slowest rank."""
    found: list[int] = []
    for path in folder.glob("*.json"):
        marks = json.loads(path.read_text())
        ends = [mark["duration_wall"] for mark in marks if (mark["name"], mark["ph"]) == ("iteration", "E")]
        found.append(ends[iteration])
    return max(found)


def test_a_loss_inside_a_pass_is_apart_from_it_and_repeated_iterations_are_left_out(folder: Path) -> None:
    path = folder / "benchmark-data-0-pipeline-1-tensor-0.json"
    marks = json.loads(path.read_text())
    at = next(place for place, mark in enumerate(marks) if (mark["name"], mark["ph"]) == ("forward", "E"))
    ends_ns = marks[at]["rel_ts"]
    marks[at:at] = [
        marks[at] | {"name": "loss", "ph": phase, "rel_ts": at_ns}
        for phase, at_ns in (("B", ends_ns - MS), ("E", ends_ns))
    ]
    path.write_text(json.dumps(marks))
    for other in folder.glob("*.json"):
        whole = json.loads(other.read_text())
        size = next(place for place, mark in enumerate(whole) if (mark["name"], mark["ph"]) == ("iteration", "E")) + 1
        other.write_text(json.dumps(whole[:size] + whole))
    job = read_traces([folder])
    rank = MegatronAppJob().rank(0, 1)
    ((start, end),) = spans(job, rank, RecordKind.LOSS_REDUCE, 0)
    assert end - start == MS
    assert spans(job, rank, RecordKind.FORWARD, 0)[0][1] == start
    assert len(ingest_of(job).store.newest(9)) == 3
    assert "4 iterations that the files hold twice are skipped" in job.notes


def test_aggregate_finds_the_slow_rank_and_perfetto_shows_all(
    slow_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "all.json"
    for spelled in (("-b", "-o", "-d"), ("--benchmark_dir", "--output", "--detect")):
        assert main(["aggregate", spelled[0], str(slow_folder), spelled[1], str(out), spelled[2]]) == 0
        printed = capsys.readouterr().out
        assert f"{out}: " in printed
        assert "cause compute, since step 2" in printed
    shown = read_chrome(json.loads(out.read_text()))
    assert dropped(shown) == []
    assert len({span.track for span in shown}) == 8


@pytest.mark.parametrize("spelling", ["-b", "--b", "--benchmark", "--bench-dir", "--benchmark_dir"])
def test_aggregate_takes_all_spellings_of_the_pages(
    spelling: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["aggregate", spelling, str(folder)]) == 0
    assert "benchmark.json: 252 spans, 36 arrows" in capsys.readouterr().out


def verdicts(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(["scan", "analyze", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_all_ways_to_recorded_steps_give_the_same_verdict(
    slow_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Analysed are the files of ranks, what is imported of them, the aggregated file, and the exported trace."""
    assert main(["trace", "import", str(slow_folder), "-o", str(tmp_path / "job" / "hub" / "traces")]) == 0
    (tmp_path / "job" / "attempt-0").mkdir()  # of the logs
    (tmp_path / "aggregated.json").write_text(json.dumps(aggregated(slow_folder)))
    ingest = ingest_of(read_traces([slow_folder]))
    exported = chrome_trace(tracks_of(source_of(ingest, "demo", ingest.store.select(0, None, newest=0))))
    (tmp_path / "exported.json").write_text(json.dumps(exported))
    assert "scan analyze reads them" in capsys.readouterr().out
    assert main(["aggregate", "-b", str(tmp_path / "job"), "-o", str(tmp_path / "again.json")]) == 0
    assert len(json.loads((tmp_path / "again.json").read_text())["traceEvents"]) == len(exported["traceEvents"])
    capsys.readouterr()
    for path in (slow_folder, tmp_path / "job", tmp_path / "aggregated.json", tmp_path / "exported.json"):
        found = verdicts([str(path)], capsys)
        assert (found["ranks"], found["steps"]) == (8, 50)
        assert len(found["verdicts"]) == 1, path
        (verdict,) = found["verdicts"]
        assert verdict["subject"]["ranks"] == [SLOW_RANK], path
        assert (verdict["cause"], verdict["state"]) == ("compute", "confirmed")
        assert 24 <= verdict["since"]["step"] <= 27
        # each of the three microbatches takes 15 ms longer on the slow rank, and the next waits for it
        assert verdict["effect"]["secondsPerStep"] == pytest.approx(0.045, rel=0.2)


def aggregated(folder: Path) -> list[dict[str, Any]]:
    """Return what MegatronApp's aggregator makes of files: complete events in microseconds, without iterations."""
    events: list[dict[str, Any]] = []
    walls = [max_wall(folder, number) for number in range(50)]
    for path in sorted(folder.glob("*.json")):
        timeline, iteration = 0, -1
        open_events: list[dict[str, Any]] = []
        for mark in json.loads(path.read_text()):
            if mark["name"] == "iteration":
                if mark["ph"] == "B":
                    iteration += 1
                    timeline = sum(walls[:iteration]) + 50 * MS * iteration
                continue
            at = int((mark["rel_ts"] + timeline) / 1000)
            if mark["ph"] == "B":
                open_events.append({"name": mark["name"], "ph": "X", "ts": at, "pid": mark["g_rk"], "tid": 0})
                continue
            event = open_events.pop()
            arguments = {key: value for key, value in mark.items() if key not in {"name", "ph", "rel_ts"}}
            events.append(event | {"dur": at - event["ts"], "args": arguments | {"iteration": iteration}})
    return events


def test_a_healthy_job_has_no_verdict(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scan", "analyze", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "3 steps of 4 ranks" in printed
    assert "nothing is slow" in printed


NAMED = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "rank 0 (pp 0, dp 0, tp 0) host"}}
BAD: list[tuple[str, Any, str]] = [
    ("a.json", "{", "a.json is no JSON"),
    ("a.json", {"traceEvents": 7}, "is no trace: it has no list of events; give files of MegatronApp's ranks"),
    ("a.json", [{"ph": "X", "name": "x"}], "its events are of no tool that is known"),
    ("a.json", [{"ph": "X", "args": {"g_rk": 0}}], "event 0 has no dp_rk, pp_rk, tp_rk and iteration in its args"),
    ("a.json", {"traceEvents": [NAMED], "metadata": {"originRealTimeNs": "5"}}, "has traces without a whole step"),
    ("benchmark-data-0-pipeline-0-tensor-0.json", {}, "holds no list of marks"),
    ("benchmark-data-0-pipeline-0-tensor-0.json", [7], "mark 0 has no name and ph"),
    ("benchmark-data-0-pipeline-0-tensor-0.json", [], "no mark has g_rk"),
    ("benchmark-data-0-pipeline-0-tensor-0.json", [{"name": "a", "ph": "B", "g_rk": 0}], "has 0 iterations"),
]


@pytest.mark.parametrize(("name", "content", "problem"), BAD)
def test_what_is_no_trace_is_explained(
    name: str, content: Any, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert main(["scan", "analyze", str(tmp_path / name)]) == 1
    assert problem in capsys.readouterr().err


def test_compressed_files_are_read_up_to_a_size(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in folder.glob("*.json"):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(ImportTraceError, match=r"\.json\.gz: another file is of the same rank; give one of each rank"):
        read_traces([folder])
    for path in folder.glob("*.json"):
        path.unlink()
    assert [rank.rank for rank in read_traces([folder]).ranks] == [0, 1, 2, 3]
    damaged = bytearray(gzip.compress(b"[]"))
    damaged[10] = 7  # a type of block that does not exist
    (tmp_path / "damaged.json.gz").write_bytes(damaged)
    assert main(["scan", "analyze", str(tmp_path / "damaged.json.gz")]) == 1
    assert "damaged.json.gz cannot be read, it is damaged: Error -3" in capsys.readouterr().err
    monkeypatch.setattr("megatronapp_analyzer.offline.read.MOST_BYTES", 1000)
    (tmp_path / "large.json.gz").write_bytes(gzip.compress(b" " * 2000))
    assert main(["scan", "analyze", str(tmp_path / "large.json.gz")]) == 1
    assert "large.json.gz has more than 1000 bytes, uncompressed; give a trace of" in capsys.readouterr().err


def test_parts_of_steps_are_no_copies(folder: Path) -> None:
    job = read_traces([folder])
    parts = list(job.parts())
    assert [(header["rank"], np.unique(part["step"]).tolist()) for header, part in parts] == [
        (rank, [step]) for step in range(3) for rank in range(4)
    ]
    for rank in job.ranks:
        own = [(header["first"], part) for header, part in parts if header["rank"] == rank.rank]
        assert np.concatenate([part for _, part in own]).tobytes() == rank.records.tobytes()
        assert [first for first, _ in own] == np.cumsum([0] + [len(part) for _, part in own])[:-1].tolist()
        assert all(np.shares_memory(part, rank.records) for _, part in own)


def test_broken_files_of_ranks_are_explained(folder: Path, tmp_path: Path) -> None:
    path = folder / "benchmark-data-0-pipeline-0-tensor-0.json"
    marks = json.loads(path.read_text())

    def problem(changed: list[dict[str, Any]]) -> str:
        path.write_text(json.dumps(changed))
        with pytest.raises(ImportTraceError) as caught:
            read_traces([folder])
        return str(caught.value)

    assert "iteration 0: 'forward-warmup' has no end" in problem(
        [marks[0], *marks[1:2], *marks[-1:], *marks[len(marks) // 3 :]]
    )
    swapped = [marks[0], marks[1], marks[2] | {"name": "loss"}, *marks[3:]]
    assert "'loss' ends while 'forward-warmup' is open; scopes must be nested" in problem(swapped)
    wrong = [marks[0], marks[1] | {"rel_ts": "x"}, *marks[2:]]
    assert "rel_ts of 'forward-warmup' is 'x'; it must be a number" in problem(wrong)
    assert "has 1 iterations, others up to 3" in problem(marks[: len(marks) // 3])
    with pytest.raises(ImportTraceError, match=r"has no \*\.json and no \*\.json\.gz"):
        read_traces([tmp_path])
    with pytest.raises(ImportTraceError, match=r"absent\.json cannot be read: No such file"):
        read_traces([tmp_path / "absent.json"])


def places(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the keys that lead to each value in a document."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(*above, key) for key, _ in inside] + [way for key, item in inside for way in places(item, (*above, key))]


@pytest.fixture(scope="module")
def documents() -> dict[str, dict[str, Any]]:
    """Files of each kind by their name."""
    files = MegatronAppJob(iterations=1, microbatches=1, replicas=1).files()
    profiles = ProfiledJob(replicas=2, steps=1).documents()
    scopes = ("forward", "backward", "allreduce", "optimizer")
    places = {"dp_rk": 0, "pp_rk": 0, "tp_rk": 0, "g_rk": 0, "iteration": 0, "dev": 0}
    events = [{"name": name, "ph": "X", "ts": 9 * at, "dur": 5, "args": places} for at, name in enumerate(scopes)]
    return {"ranks": files, "profiles": profiles, "aggregated": {"aggregated.json": events}}


@pytest.mark.parametrize("kind", ["ranks", "profiles", "aggregated", "exported"])
@settings(max_examples=40)
@given(draw=st.data())
def test_a_damaged_file_is_read_or_refused(
    kind: str, draw: st.DataObject, documents: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    if kind == "exported":
        folder = written(documents["ranks"], tmp_path_factory)
        ingest = ingest_of(read_traces([folder]))
        files: dict[str, Any] = {"a.json": chrome_trace(tracks_of(source_of(ingest, "demo", ingest.store.newest(9))))}
    else:
        files = documents[kind]
    files = json.loads(json.dumps(files))
    first = next(iter(files))
    *way, key = draw.draw(st.sampled_from(places(files[first])))
    damaged = files[first]
    for step in way:
        damaged = damaged[step]
    bad: list[Any] = [None, -1, 2.5, math.nan, math.inf, 1e300, 1 << 63, 1 << 40, "x", "", [], {}, True]
    damaged[key] = draw.draw(st.sampled_from(bad))
    try:
        ingest_of(read_traces([written(files, tmp_path_factory)]))
    except ImportTraceError as error:
        assert ".json" in str(error) or "rank" in str(error)


def written(files: dict[str, Any], factory: pytest.TempPathFactory) -> Path:
    folder = factory.mktemp("files")
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_stored_traces_without_steps_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "attempt-0000").mkdir()
    (tmp_path / "attempt-0000" / "rings.frames").touch()
    for command in (["scan", "analyze", str(tmp_path)], ["aggregate", "-b", str(tmp_path), "-o", str(tmp_path / "o")]):
        assert main(command) == 1
        assert f"{tmp_path} has traces without a whole step; give another file or folder" in capsys.readouterr().err


def test_import_writes_into_an_empty_folder_only(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "import", str(folder), "-o", str(folder)]) == 1
    assert "is not empty; choose another -o FOLDER" in capsys.readouterr().err
