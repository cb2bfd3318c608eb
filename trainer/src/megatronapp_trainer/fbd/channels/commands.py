"""Commands of backward ranks to forward ranks, and a credit for each pass whose memory is free again."""

import enum
from typing import NamedTuple, Self


class Command(enum.IntEnum):
    """Work that forward ranks do next."""

    END = 0
    """The training has ended."""
    TRAIN = 1
    """Forward passes of a training step, whose tensors are shipped."""
    EVALUATE = 2
    """Forward passes whose losses alone are reported."""
    CREDIT = 3
    """No command: a backward pass of the step has ended."""


class Split(enum.IntEnum):
    """Samples that an evaluation reads."""

    VALIDATION = 0
    TEST = 1


_COUNT_BITS, _SPLIT_BITS = 24, 2


class Order(NamedTuple):
    """A command with its arguments."""

    command: Command
    num_microbatches: int = 0
    """For END the exit code of the backward ranks."""
    split: Split = Split.VALIDATION
    sends_weights: bool = False
    """Weights have changed since the last command, and follow."""

    def pack(self) -> int:
        """Return the order as a number of 64 bits."""
        number = self.command << 1 | self.sends_weights
        return (number << _SPLIT_BITS | self.split) << _COUNT_BITS | self.num_microbatches

    @classmethod
    def unpack(cls, number: int) -> Self:
        """Return the order that `pack` made a number of."""
        rest, count = number >> _COUNT_BITS, number & (1 << _COUNT_BITS) - 1
        split, rest = Split(rest & (1 << _SPLIT_BITS) - 1), rest >> _SPLIT_BITS
        return cls(Command(rest >> 1), count, split, bool(rest & 1))


CREDIT = Order(Command.CREDIT).pack()
