"""Import of traces of PyTorch's profiler: a real one of a CPU, and generated ones of ranks with GPUs."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from profiled_job import ProfiledJob

from megatronapp_analyzer.errors import ImportTraceError
from megatronapp_analyzer.model import Communicator
from megatronapp_analyzer.offline.job import RecordedJob
from megatronapp_analyzer.offline.read import read_traces
from megatronapp_analyzer.offline.stored import ingest_of
from megatronapp_common.cli import main
from megatronapp_common.trace import BYTES_UNIT, DURATION_UNIT_NS, Flag, RecordKind

MS = 1_000_000


def written(documents: dict[str, Any], folder: Path) -> Path:
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document), encoding="utf-8")
    return folder


def of_step(job: RecordedJob, rank: int, step: int) -> list[tuple[RecordKind, int, float]]:
    """Return kind, microbatch and milliseconds of the records of a step, by start, without the step itself."""
    records = job.ranks[rank].records
    rows = records[(records["step"] == step) & (records["kind"] != RecordKind.STEP)]
    return [
        (RecordKind(int(row["kind"])), int(row["microbatch"]), int(row["duration"]) * DURATION_UNIT_NS / MS)
        for row in np.sort(rows, order="start_ns")
    ]


def profiled(path: str) -> None:
    """Write the trace of three steps of two microbatches with a gloo group of one rank and Adam.

    Passes take milliseconds: where one waits for a processor, others must not be a twentieth of it.
    """
    import warnings

    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, schedule

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    optimizer = torch.optim.Adam(model.parameters())
    with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=3)) as profiler:
        for _ in range(5):
            for _ in range(2):
                model(torch.randn(512, 256)).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profiler.export_chrome_trace(path)
    dist.destroy_process_group()


@pytest.mark.torch
def test_a_real_trace_has_the_passes_that_were_run(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    path = tmp_path / "torch-cpu.json.gz"
    run_ranks(1, profiled, str(path))
    job = read_traces([path])
    passes = [(RecordKind.FORWARD, 0), (RecordKind.BACKWARD, 0), (RecordKind.FORWARD, 1), (RecordKind.BACKWARD, 1)]
    for step in (2, 3, 4):
        found = [(kind, batch) for kind, batch, _ in of_step(job, 0, step)]
        assert found[:4] == passes
        assert [kind for kind, _ in found[4:]] == [RecordKind.GRAD_REDUCE] * 4 + [RecordKind.OPTIMIZER]
    assert job.layout == {"tensor": 1, "pipeline": 1, "data": 1, "virtualPipeline": 1}
    assert "there are no kernels: passes are those of operators of the host" in job.notes


def test_kernels_belong_to_the_phase_that_launched_them(tmp_path: Path) -> None:
    job = read_traces([written(ProfiledJob(replicas=2, steps=2, slow_from=9).documents(), tmp_path)])
    found = of_step(job, 1, 1)
    assert [(kind, batch) for kind, batch, _ in found[:4]] == [
        (RecordKind.FORWARD, 0),
        (RecordKind.BACKWARD, 0),
        (RecordKind.FORWARD, 1),
        (RecordKind.BACKWARD, 1),
    ]
    assert [length for _, _, length in found[:4]] == pytest.approx([4, 8, 4, 8], rel=0.02)
    assert [kind for kind, _, _ in found[4:]] == [RecordKind.GRAD_REDUCE, RecordKind.OPTIMIZER]
    records = job.ranks[1].records
    reduced = records[records["kind"] == RecordKind.GRAD_REDUCE]
    assert (reduced["flags"] == Flag.AUX_BYTES | Flag.DEVICE_CLOCK).all()
    assert (reduced["aux"] == (4 << 20) // BYTES_UNIT).all()
    assert job.ranks[1].communicators == [Communicator("dp", (0, 1))]
    steps = records[records["kind"] == RecordKind.STEP]
    gap_ns = int(steps["start_ns"][1]) - int(steps["start_ns"][0]) - int(steps["duration"][0]) * DURATION_UNIT_NS
    assert 0 <= gap_ns < DURATION_UNIT_NS, "a step begins where the one before it has ended"


def test_messages_and_tensor_groups_are_known_by_their_arguments(tmp_path: Path) -> None:
    document = ProfiledJob(replicas=2, steps=1).documents()["trace-0.json"]
    document["distributedInfo"]["pg_config"] = [
        {"pg_name": "1", "pg_desc": "PIPELINE_MODEL_PARALLEL_GROUP", "ranks": [0, 1]},
        {"pg_name": "2", "pg_desc": "TENSOR_MODEL_PARALLEL_GROUP", "ranks": [0]},
    ]
    (kernel,) = (event for event in document["traceEvents"] if event["name"].startswith("nccl"))
    described = {"Process Group Name": "2", "Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP"}
    sent = {"Collective name": "send", "Dst Rank": "1", "In msg nelems": 64, "dtype": "BFloat16"}
    shortened = {"Process Group Ranks": "[0, ..., 1]", "Process Group Name": "9"}
    document["traceEvents"] += [
        kernel | {"ts": kernel["ts"] + 10, "args": kernel["args"] | described | {"Process Group Ranks": "[0]"}},
        kernel | {"ts": kernel["ts"] + 20, "args": kernel["args"] | sent},
        kernel | {"ts": kernel["ts"] + 30, "args": kernel["args"] | shortened},
    ]
    job = read_traces([written({"one.json": document}, tmp_path)])
    assert job.layout == {"tensor": 1, "pipeline": 2, "data": 1, "virtualPipeline": 1}
    kinds = {kind for kind, _, _ in of_step(job, 0, 0)}
    assert kinds >= {RecordKind.TP_REDUCE, RecordKind.SEND_POST, RecordKind.SEND_WAIT, RecordKind.GRAD_REDUCE}
    assert Communicator("p2p", (0, 1)) in job.ranks[0].communicators
    assert "ranks 1 have no file" in job.notes
    assert "collectives that do not name their ranks: 1; they are taken for those of all" in job.notes


def test_the_slow_rank_of_a_profiled_job_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(ProfiledJob().documents(), tmp_path)
    assert main(["scan", "analyze", str(folder), "--json"]) == 0
    (verdict,) = json.loads(capsys.readouterr().out)["verdicts"]
    assert (verdict["subject"]["ranks"], verdict["cause"], verdict["state"]) == ([2], "compute", "confirmed")
    assert 19 <= verdict["since"]["step"] <= 22
    assert verdict["effect"]["secondsPerStep"] == pytest.approx(0.012, rel=0.2)


def test_clocks_of_hosts_are_aligned_by_collectives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The clock of the second host is 80 ms ahead, several times as much as a step's wait."""
    named = {}
    for rank, document in enumerate(ProfiledJob().documents().values()):
        events = [event | {"ts": event["ts"] + 80_000 * (rank > 1)} for event in document["traceEvents"]]
        named[f"gpu-{rank // 2}_{rank + 70}.1790000000.pt.trace.json"] = document | {"traceEvents": events}
    assert main(["scan", "analyze", str(written(named, tmp_path)), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (verdict,) = found["verdicts"]
    assert (verdict["subject"]["ranks"], verdict["subject"]["node"], verdict["cause"]) == ([2], "gpu-1", "compute")
    assert verdict["effect"]["secondsPerStep"] == pytest.approx(0.012, rel=0.2)
    assert found["notes"] == []
    offsets_ns = ingest_of(read_traces([tmp_path])).store.newest(1)[0].offsets_ns
    assert offsets_ns[2] - offsets_ns[0] == pytest.approx(-80 * MS, abs=MS)


def test_traces_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    document = ProfiledJob(replicas=2, steps=1).documents()["trace-0.json"]

    def problem(*documents: dict[str, Any]) -> str:
        paths = [tmp_path / f"{number}.json" for number in range(len(documents))]
        for path, content in zip(paths, documents, strict=True):
            path.write_text(json.dumps(content), encoding="utf-8")
        with pytest.raises(ImportTraceError) as caught:
            read_traces(paths)
        return str(caught.value)

    assert "2 files are of rank 0; give one of each rank" in problem(document, document)
    without = {key: value for key, value in document.items() if key != "distributedInfo"}
    assert "does not say of which rank it is; name the files rank0.json" in problem(without, document)
    assert "has no kernel and no operator inside a step" in problem(document | {"traceEvents": []})
    broken = [event | {"ts": "x"} for event in document["traceEvents"]]
    assert "0.json: an event lacks something or has it in another form" in problem(document | {"traceEvents": broken})
    (tmp_path / "bad.json.gz").write_bytes(gzip.compress(b"{}")[:-9])
    with pytest.raises(ImportTraceError, match=r"bad\.json\.gz (is no JSON|cannot be read)"):
        read_traces([tmp_path / "bad.json.gz"])


def test_aggregate_does_not_read_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(ProfiledJob(replicas=2, steps=2).documents(), tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["aggregate"]) == 0
    first = (tmp_path / "benchmark.json").read_bytes()
    assert main(["aggregate"]) == 0
    assert (tmp_path / "benchmark.json").read_bytes() == first
