"""Shared memory without room: from a file system to the condition and the event."""

import dataclasses
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from megatronapp_common.shared_memory_space import LEAST_BYTES, SharedMemorySpace
from megatronapp_operator.plan import ConditionType, RecordEvent
from megatronapp_operator.plan_io import hub_summary

FULL = SharedMemorySpace(path="/dev/shm", total=64 << 20, free=LEAST_BYTES - 1)
ANSWER: dict[str, Any] = {"attempt": 0, "progress": None, "slowRanks": [], "hungRanks": []}


def event_reasons(made: Any) -> list[str]:
    return [action.reason for action in made.actions if isinstance(action, RecordEvent)]


def test_full_shared_memory_is_reported_once_and_its_end_noticed(running: Callable[..., Any]) -> None:
    made = running()
    entry = {"worker": 1, "node": "n1", **FULL.to_json()}
    read = hub_summary.read_summary(ANSWER | {"fullSharedMemory": [entry]})
    assert read is not None
    made.see(*made.observed.workers, full_shared_memory=read.full_shared_memory)
    first = made.plan()
    condition = first.status.condition(ConditionType.SHARED_MEMORY_FULL)
    assert (condition.status, condition.reason, event_reasons(first)) == (
        True,
        "SharedMemoryFull",
        ["SharedMemoryFull"],
    )
    assert condition.message.startswith("worker 1 on n1: /dev/shm (64 MiB) has less than 4 MiB free: ")
    assert "raise spec.shm.sizeLimit" in condition.message
    less = entry | dataclasses.replace(FULL, free=0).to_json()
    read = hub_summary.read_summary(ANSWER | {"fullSharedMemory": [less]})
    assert read is not None
    made.see(*made.observed.workers, full_shared_memory=read.full_shared_memory)
    assert (again := made.plan()).status == first.status and event_reasons(again) == [], "no write for each byte"
    made.see(*made.observed.workers, full_shared_memory=None)
    assert made.plan().status.is_true(ConditionType.SHARED_MEMORY_FULL), "a hub that is silent takes nothing back"
    made.see(*made.observed.workers, full_shared_memory=())
    assert not made.plan().status.is_true(ConditionType.SHARED_MEMORY_FULL)


@pytest.mark.parametrize("entries", [None, 3, [3], [{}], [{"worker": 0, "node": "n", "path": "x", "bytes": "y"}]])
def test_an_unreadable_report_clears_no_warning(entries: Any) -> None:
    read = hub_summary.read_summary(ANSWER | {"fullSharedMemory": entries})
    assert read is not None and read.full_shared_memory is None


MEASURE = """
import pathlib, sys
from megatronapp_common.shared_memory_space import SharedMemorySpace
folder = pathlib.Path(sys.argv[1])
print(SharedMemorySpace.measure(folder).full)
with (folder / "filler").open("wb", buffering=0) as file:
    file.write(bytes(5 << 20))
print(SharedMemorySpace.measure(folder).full)
"""


def test_a_file_system_is_measured(tmp_path: pathlib.Path) -> None:
    script = f'mount -t tmpfs -o size=8m none {tmp_path} || exit 77; exec "$@"'
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh", sys.executable, "-c", MEASURE]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip(f"no mount of one's own on this machine: {done.stderr.strip()}")
    assert done.stdout.split() == ["False", "True"]


def test_a_deleted_folder_measures_nothing(tmp_path: pathlib.Path) -> None:
    assert SharedMemorySpace.measure(tmp_path / "gone") is None
