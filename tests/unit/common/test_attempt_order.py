"""Orders to continue with another attempt, as they are written and read, and the lock of a launcher."""

import pathlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.attempt_order import AttemptOrder, ends_at_checkpoint, lock_path, prefix_at, read_order
from megatronapp_common.processes import is_locked


@given(
    attempt=st.integers(0, 10**6),
    grace_s=st.integers(0, 86400),
    place=st.none() | st.tuples(st.integers(0, 9999), st.none() | st.just("job-spare-0-1.job-workers.ns.svc:19400")),
    ends=st.sampled_from([{}, {"at_checkpoint": True}, {"withdrawn": True}]),
)
def test_an_order_is_read_as_it_was_written(
    attempt: int, grace_s: int, place: tuple[int, str | None] | None, ends: dict[str, bool]
) -> None:
    worker, coordinator = place or (None, None)
    order = AttemptOrder(attempt=attempt, grace_s=grace_s, worker=worker, coordinator=coordinator, **ends)
    assert AttemptOrder.parse(f"{order.text}\n") == order


@given(text=st.text())
def test_any_other_text_is_no_order(text: str) -> None:
    found = AttemptOrder.parse(text)
    assert found is None or (found.attempt >= 0 and found.grace_s >= 0)


@pytest.mark.parametrize(
    "text", ["", "3", "x 5", "-1 5", "3 x", "3 5 7", "3 5 x host:1", "3 5 1 host:1 2", "checkpoint", "3 checkpoint 5"]
)
def test_a_text_with_an_error_is_no_order(text: str) -> None:
    assert AttemptOrder.parse(text) is None


def test_only_a_later_attempt_is_an_order(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "order"
    assert read_order(path, after=0) is None
    path.write_text("3 30")
    assert read_order(path, after=2) == AttemptOrder(attempt=3, grace_s=30)
    assert read_order(path, after=3) is None
    path.write_text("3 30 1 host:19400 continue")
    assert not ends_at_checkpoint(path, attempt=3) and read_order(path, after=3) is None
    assert read_order(path, after=2) == AttemptOrder(
        attempt=3, grace_s=30, worker=1, coordinator="host:19400", withdrawn=True
    )


def test_only_an_order_of_the_attempt_ends_it_at_a_checkpoint(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "order"
    assert not ends_at_checkpoint(path, attempt=3)
    path.write_text("3 30")
    assert not ends_at_checkpoint(path, attempt=3)
    path.write_text("3 30 1 host:19400 checkpoint")
    assert ends_at_checkpoint(path, attempt=3) and not ends_at_checkpoint(path, attempt=2)
    assert read_order(path, after=3) is None


@given(
    uid=st.text("0123456789abcdef-a", min_size=1),
    worker=st.integers(0, 4096),
    place=st.none() | st.integers(0, 4096),
    attempts=st.tuples(*[st.integers(0, 99)] * 2),
)
def test_a_prefix_names_each_attempt_once(uid: str, worker: int, place: int | None, attempts: tuple[int, int]) -> None:
    before = f"megatronapp-{uid}-a{attempts[0]}-w{worker}"
    after = f"megatronapp-{uid}-a{attempts[1]}-w{worker if place is None else place}"
    assert prefix_at(before, attempts[1], before=attempts[0], worker=worker, place=place) == after


def test_the_lock_ends_with_its_process(tmp_path: pathlib.Path) -> None:
    path = lock_path(tmp_path, "u", 1)
    assert not is_locked(path)
    program = (
        "import pathlib, sys\n"
        "from megatronapp_common.attempt_order import take_lock\n"
        "take_lock(pathlib.Path(sys.argv[1]))\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        assert is_locked(path)
        holder.kill()
        holder.wait()
    assert not is_locked(path)
