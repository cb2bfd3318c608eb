"""Storage of graphs: families that share memory, and of those the ones that ran last."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from megatronapp_trainer.device.cuda_graphs import GraphCache
from megatronapp_trainer.device.lru import LruCache


@given(st.lists(st.integers(0, 6)), st.integers(1, 4))
def test_the_last_ones_are_kept_and_every_other_is_told_of(asked: list[int], most: int) -> None:
    gone: list[int] = []
    made: list[int] = []

    def make(key: int) -> str:
        made.append(key)
        return f"v{key}"

    recent: LruCache[int, str] = LruCache(most, lambda key, value: gone.append(key if value == f"v{key}" else -1))
    for place, key in enumerate(asked):
        assert recent.get(key, functools.partial(make, key)) == f"v{key}"
        last = list(dict.fromkeys(reversed(asked[: place + 1])))[:most]
        assert recent.order == last[::-1]
    assert sorted(made) == sorted(gone + recent.order)
    recent.drop(lambda key: key % 2 == 0)
    assert all(key % 2 for key in recent.order)
    recent.drop()
    assert sorted(made) == sorted(gone)


@dataclasses.dataclass
class Captures:
    """Fake device that numbers memory and counts what is replayed."""

    pools: list[int | None] = dataclasses.field(default_factory=list)
    replays: int = 0

    def __call__(self, compute: Callable[[], Any], pool: int | None) -> tuple[Callable[[], None], Any, int]:
        self.pools.append(pool)
        return self._replay, compute(), len(self.pools) if pool is None else pool

    def _replay(self) -> None:
        self.replays += 1


def test_families_share_memory_and_the_one_that_nobody_looks_at_stays() -> None:
    captures, gone = Captures(), list[Any]()
    graphs = GraphCache(enabled=True, most=2, forget=gone.append, capture=captures)
    for family, key in ((None, 1), ("a", 1), ("a", 2), (None, 2), ("a", 1), ("b", 1)):
        assert graphs.run(family, key, functools.partial(tuple, (family, key))) == (family, key)
    assert captures.pools == [None, None, 2, 1, None]
    assert (captures.replays, gone) == (6, [])
    graphs.run("a", 1, tuple)
    graphs.run("c", 1, tuple)
    assert gone == ["b"]
    graphs.run(None, 1, tuple)
    graphs.run("a", 2, tuple)
    assert captures.pools[5:] == [None]
    graphs.drop(lambda family: family == "a")
    assert gone == ["b", "a"]
    graphs.run("a", 1, tuple)
    assert captures.pools[6:] == [None]
    graphs.clear()
    assert gone == ["b", "a", "c", "a"]
    graphs.run(None, 1, tuple)
    assert captures.pools[7:] == [None]


def test_without_graphs_everything_is_computed() -> None:
    captures = Captures()
    graphs = GraphCache(enabled=False, capture=captures)
    results = iter(range(3))
    assert [graphs.run("a", 1, lambda: next(results)) for _ in range(3)] == [0, 1, 2]
    assert captures.pools == []


def test_turns_of_a_family_share_no_memory_and_go_together() -> None:
    captures, gone = Captures(), list[Any]()
    graphs = GraphCache(enabled=True, forget=gone.append, capture=captures)
    for turn in (0, 1, 0, 1):
        assert graphs.run("a", 1, functools.partial(tuple, (turn,)), turn=turn) == (turn,)
    graphs.run("a", 2, tuple, turn=1)
    assert captures.pools == [None, None, 2]
    graphs.drop(lambda _family: True)
    assert gone == ["a"]
