"""`megatronapp transport bench`, run for real, and its refusals."""

import json
import os
import pathlib
import secrets
import subprocess
import sys

import pytest

from megatronapp_common import cli
from megatronapp_common.names import Env


def bench(*flags: str) -> int:
    return cli.main(["transport", "bench", "--rounds", "1", "--sizes", "1", *flags])


def test_each_pair_of_ranks_is_measured(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(Env.SHM_DIR, str(tmp_path))
    assert bench("--ranks", "3", "--json") == 0
    result = json.loads(capfd.readouterr().out)
    assert [pair["ranks"] for pair in result["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    for pair in result["pairs"]:
        assert pair["latency_us"]["transport"] > 0
        for rates in pair["bandwidth_gb_s"][str(1 << 20)].values():
            assert set(rates) == {"memcpy", "transport"}
            assert all(rate > 0 for rate in rates.values())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full("torch is imported by each rank")
@pytest.mark.torch
def test_gloo_is_measured_on_demand(capfd: pytest.CaptureFixture[str]) -> None:
    assert bench("--gloo") == 0
    printed = capfd.readouterr().out
    assert "gloo, us" in printed
    assert [line.split()[2] for line in printed.splitlines() if line.startswith("0-1 ")][1:] == [
        "memcpy",
        "transport",
        "gloo",
    ]


def test_tables_have_a_line_for_each_pair_size_and_path() -> None:
    from megatronapp_trainer.pipeline.transport.bench.results import tables

    rates = {name: {"memcpy": 9.0, "transport": 8.5} for name in ("forth", "back", "both")}
    pair = {"ranks": [2, 10], "latency_us": {"transport": 1.25}, "bandwidth_gb_s": {str(64 << 20): rates}}
    assert list(tables({"pairs": [pair]})) == [
        "pair       transport, us",
        "2-10                 1.2",
        "",
        "pair       MiB        GB/s   forth    back    both",
        "2-10        64      memcpy    9.00    9.00    9.00",
        "2-10        64   transport    8.50    8.50    8.50",
    ]


def test_too_little_memory_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fields = list(os.statvfs("/"))
    fields[4] = 1  # free blocks
    monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result(fields))
    assert bench() == 1
    assert "the messages of a pair take 8 MiB; give smaller --sizes" in capsys.readouterr().err


def test_a_rank_that_fails_is_named_by_its_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda _count: "a/b")
    assert bench() == 1
    assert "a rank of the measurement failed: megatronapp_native.errors.TransportError: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [("--ranks=1", "1 is not between 2 and 64"), ("--sizes=1,0", "0 is not between 1 and 1024"), ("--sizes=x", "x")],
)
def test_numbers_out_of_bounds_are_refused(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(flags) == 2
    assert message in capsys.readouterr().err


def test_ranks_without_gloo_import_no_torch() -> None:
    code = "import sys, megatronapp_trainer.pipeline.transport.bench.rank; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
