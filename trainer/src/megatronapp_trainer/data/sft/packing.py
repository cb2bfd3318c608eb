"""Packing of conversations into samples of one length. Pure: the same lengths and seed give the same samples."""

import bisect
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

OPEN_BINS = 64
"""Samples that are filled at the same time; more leave fewer places empty."""


def pack(lengths: Sequence[int], order: Iterable[int], capacity: int) -> Iterator[list[int]]:
    """Yield the conversations of each sample: each in `order` once, of at most `capacity` places together.

    Each is added to the fullest open sample that it fits into, or begins another sample, in place of the fullest if
    `OPEN_BINS` are open. A conversation of more than `capacity` takes a whole sample.
    """
    free: list[tuple[int, int]] = []  # free places and number of each open sample, the fullest first
    contents: dict[int, list[int]] = {}
    opened = 0
    for conversation in order:
        length = min(lengths[conversation], capacity)
        at = bisect.bisect_left(free, (length, -1))
        if at < len(free):
            places, number = free.pop(at)
        else:
            if len(free) == OPEN_BINS:
                yield contents.pop(free.pop(0)[1])
            places, number = capacity, opened
            contents[number] = []
            opened += 1
        contents[number].append(conversation)
        if places == length:
            yield contents.pop(number)
        else:
            bisect.insort(free, (places - length, number))
    for _, number in free:
        yield contents.pop(number)


def packed_epochs(lengths: Sequence[int], capacity: int, *, seed: int, samples: int | None) -> list[list[int]]:
    """Return at least `samples` samples, from epochs that are shuffled differently; None: those of a single epoch."""
    found: list[list[int]] = []
    epoch = 0
    while epoch == 0 or (samples is not None and len(found) < samples):
        draw = np.random.RandomState([seed, epoch])
        of_epoch = list(pack(lengths, draw.permutation(len(lengths)).tolist(), capacity))
        found += [of_epoch[place] for place in draw.permutation(len(of_epoch))]
        epoch += 1
    return found
