"""Choice of the step to resume from, and of who sends which part. Pure: every rank computes the same.

Ranks on one worker share its memory. The state of rank r is on its own worker, and copies of it are on those of the
ranks r + J, r + 2 J, ..., counted around the world: Megatron's `--replication-jump` and `--replication-factor`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

Stored = tuple[int, str, int]
"""Step, token of the save, and rank of a part."""


def copy_holders(rank: int, world: int, *, jump: int, factor: int) -> tuple[int, ...]:
    """Return the ranks that store copies of a rank's state, besides its own."""
    holders = dict.fromkeys((rank + number * jump) % world for number in range(1, factor))
    return tuple(holder for holder in holders if holder != rank)


def ranks_with_useless_copies(workers: Sequence[str], *, jump: int, factor: int) -> list[int]:
    """Return the ranks whose state would be twice on a worker; `workers`: that of each rank."""
    found: list[int] = []
    for rank in range(len(workers)):
        holders = copy_holders(rank, len(workers), jump=jump, factor=factor)
        if len({workers[place] for place in (rank, *holders)}) < factor:
            found.append(rank)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A save of all ranks, as far as its parts are there."""

    step: int
    save: str
    sources: Mapping[int, tuple[str, ...]]
    """Workers that have the part of each rank."""
    missing: tuple[int, ...]
    """Ranks whose part no worker has."""


def generations(stored: Mapping[str, Collection[Stored]], world: int) -> list[Generation]:
    """Return the saves of which there is a part, newest first; `stored`: the parts that each worker has."""
    saves = sorted({(step, save) for parts in stored.values() for step, save, _ in parts}, reverse=True)
    return [_generation(stored, world, step, save) for step, save in saves]


def _generation(stored: Mapping[str, Collection[Stored]], world: int, step: int, save: str) -> Generation:
    sources = {
        rank: tuple(sorted(worker for worker, parts in stored.items() if (step, save, rank) in parts))
        for rank in range(world)
    }
    missing = tuple(rank for rank, workers in sources.items() if not workers)
    return Generation(step=step, save=save, sources=sources, missing=missing)


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """A part that one rank sends to another, whose state it is."""

    sender: int
    receiver: int


def transfers(generation: Generation, workers: Sequence[str]) -> list[Transfer]:
    """Return who sends what, in the order in which every rank does its own transfers.

    A rank whose worker has its part receives nothing. Several senders of one worker alternate.
    """
    found: list[Transfer] = []
    for rank, sources in generation.sources.items():
        if workers[rank] in sources or not sources:
            continue
        senders = [sender for sender, worker in enumerate(workers) if worker == sources[0]]
        found.append(Transfer(sender=senders[len(found) % len(senders)], receiver=rank))
    return found


def without(generation: Generation, damaged: Collection[tuple[str, int]]) -> Generation:
    """Return a save without the parts, given by worker and rank, that turned out to be damaged."""
    sources = {
        rank: tuple(worker for worker in workers if (worker, rank) not in damaged)
        for rank, workers in generation.sources.items()
    }
    missing = tuple(rank for rank, workers in sources.items() if not workers)
    return Generation(step=generation.step, save=generation.save, sources=sources, missing=missing)


def describe_ranks(ranks: Sequence[int]) -> str:
    """Return a short list of ranks for a message."""
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{', ...' if len(ranks) > 8 else ''}"
