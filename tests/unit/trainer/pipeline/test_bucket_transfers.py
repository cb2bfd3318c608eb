"""While a pass is recorded no transfer of data parallelism begins; replays begin each once, in its place."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatronapp_trainer.pipeline.graphs.bucket_transfers import BucketTransfers, Insert


class Group:
    """A group of buckets that lists its calls."""

    def __init__(self, name: str, calls: list[tuple[Any, ...]]) -> None:
        self.name = name
        self.calls = calls
        self.per_param_grad_ready_counts: dict[str, int] = {}

    def finish_param_sync(self, **options: bool) -> None:
        """Append the call to those of the chunk."""
        self.calls.append(("gather", self.name, options))

    def start_grad_sync(self, **options: bool) -> None:
        """Append the call to those of the chunk."""
        self.calls.append(("reduce", self.name, options))


class HookedChunk:
    """Two groups of buckets, which a pass uses as megatron-core's hooks do."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.shared, self.experts = Group("shared", self.calls), Group("experts", self.calls)
        self.shared.start_grad_sync = self.ordered  # type: ignore[method-assign] # as `order_reductions` does

    @property
    def wrapped(self) -> Any:
        """The chunk as DistributedDataParallel has its groups."""
        return SimpleNamespace(bucket_groups=[self.shared], expert_parallel_bucket_groups=[self.experts])

    def ordered(self, **options: bool) -> None:
        """Begin the reduction of the shared group."""
        self.calls.append(("ordered reduce", "shared", options))

    def run(self) -> None:
        """Use each group in two modules, and begin its reduction."""
        for group in (self.shared, self.experts, self.shared):
            group.finish_param_sync(skip_next_bucket_dispatch=False)
        for group in (self.experts, self.shared):
            group.per_param_grad_ready_counts["weight"] = 1
            group.start_grad_sync(force_all_reduce=False)


GATHERS = [("gather", name, {"skip_next_bucket_dispatch": False}) for name in ("shared", "experts")]
MORE_GATHERS = [*GATHERS, GATHERS[0]]
REDUCES = [
    ("reduce", "experts", {"force_all_reduce": False}),
    ("ordered reduce", "shared", {"force_all_reduce": False}),
]


@pytest.mark.parametrize(
    ("gathers", "reduces", "at_once", "in_replays"),
    [
        (True, False, REDUCES, GATHERS),
        (False, True, MORE_GATHERS, REDUCES),
        (True, True, [], [*GATHERS, *REDUCES]),
    ],
)
def test_recorded_transfers_begin_in_replays_alone(
    gathers: bool, reduces: bool, at_once: list[Any], in_replays: list[Any]
) -> None:
    chunk = HookedChunk()
    parts: list[Any] = []
    with BucketTransfers(chunk.wrapped, gathers=gathers, reduces=reduces).postponed(parts.append):
        chunk.run()
    assert chunk.calls == at_once
    for _ in range(2):
        chunk.calls.clear()
        for part in parts:
            part()
        assert chunk.calls == in_replays


def test_counts_of_a_recorded_pass_are_forgotten() -> None:
    chunk = HookedChunk()
    with BucketTransfers(chunk.wrapped, gathers=False, reduces=True).postponed(lambda _: None):
        chunk.run()
    assert chunk.shared.per_param_grad_ready_counts == chunk.experts.per_param_grad_ready_counts == {}


def out_of_memory(_: object) -> None:
    """Fail as the begin of a capture does."""
    raise MemoryError


@pytest.mark.parametrize("insert", [lambda _: None, out_of_memory])
def test_groups_are_as_before_after_a_recording_and_after_a_failure(insert: Insert) -> None:
    chunk = HookedChunk()
    before = [{**vars(group), "per_param_grad_ready_counts": {}} for group in (chunk.shared, chunk.experts)]
    try:
        with BucketTransfers(chunk.wrapped, gathers=True, reduces=True).postponed(insert):
            chunk.run()
    except MemoryError:
        assert insert is out_of_memory
    assert [vars(group) for group in (chunk.shared, chunk.experts)] == before
    chunk.run()
    assert chunk.calls == [*MORE_GATHERS, *REDUCES]
