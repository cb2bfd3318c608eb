"""Storage of graphs: families that share memory, and of those the ones that ran last."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from megatronapp_trainer.device.cuda_graphs import GraphCache


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


@given(st.lists(st.integers(0, 6)), st.integers(1, 4))
def test_families_that_ran_last_stay_and_others_are_freed_before_a_capture(families: list[int], most: int) -> None:
    captures, freed = Captures(), list[Any]()
    graphs = GraphCache(enabled=True, most=most, forget=freed.append, capture=captures)
    recent: list[int] = []
    expected: list[int] = []
    for family in families:
        known = family in recent
        recent = [*(other for other in recent if other != family), family]
        expected += recent[:-most]
        recent = recent[-most:]
        freed_by_capture = graphs.run(family, 1, lambda: list(freed))
        assert known or freed_by_capture == expected
        assert freed == expected
    assert len(captures.pools) == len(freed) + len(recent)
    graphs.drop(lambda family: family in (0, 2, 4, 6))
    assert sorted(freed[len(expected) :]) == sorted(family for family in recent if family % 2 == 0)
    graphs.clear()
    assert sorted(freed[len(expected) :]) == sorted(recent)


def test_graphs_of_families_use_common_memory_and_the_last_used_graph_stays() -> None:
    captures, forgotten = Captures(), list[Any]()
    graphs = GraphCache(enabled=True, most=2, forget=forgotten.append, capture=captures)
    for family, key in ((None, 1), ("a", 1), ("a", 2), (None, 2), ("a", 1), ("b", 1)):
        assert graphs.run(family, key, functools.partial(tuple, (family, key))) == (family, key)
    assert captures.pools == [None, None, 2, 1, None]
    assert (captures.replays, forgotten) == (6, [])
    graphs.run("a", 1, tuple)
    graphs.run("c", 1, tuple)
    assert forgotten == ["b"]
    graphs.run(None, 1, tuple)
    graphs.run("a", 2, tuple)
    assert captures.pools[5:] == [None]
    graphs.drop(lambda family: family == "a")
    assert forgotten == ["b", "a"]
    graphs.run("a", 1, tuple)
    assert captures.pools[6:] == [None]
    graphs.clear()
    assert forgotten == ["b", "a", "c", "a"]
    graphs.run(None, 1, tuple)
    assert captures.pools[7:] == [None]


def test_without_graphs_everything_is_computed() -> None:
    captures = Captures()
    graphs = GraphCache(enabled=False, capture=captures)
    results = iter(range(3))
    assert [graphs.run("a", 1, lambda: next(results)) for _ in range(3)] == [0, 1, 2]
    assert captures.pools == []


def test_rotating_graphs_of_a_family_use_separate_memory_and_are_forgotten_together() -> None:
    captures, forgotten = Captures(), list[Any]()
    graphs = GraphCache(enabled=True, forget=forgotten.append, capture=captures)
    for parity in (0, 1, 0, 1):
        assert graphs.run("a", 1, functools.partial(tuple, (parity,)), buffer_set=parity) == (parity,)
    graphs.run("a", 2, tuple, buffer_set=1)
    assert captures.pools == [None, None, 2]
    graphs.drop(lambda _family: True)
    assert forgotten == ["a"]
