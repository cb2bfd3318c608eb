"""Commands of backward ranks to forward ranks, and a credit for each pass whose memory is free again."""

import enum
from typing import NamedTuple, Self

from megatronapp_trainer.config.fbd import ShipMode


class Command(enum.IntEnum):
    """Work that forward ranks do next."""

    END = 0
    """The training has ended."""
    TRAIN = 1
    """Forward passes of a training step, whose tensors are shipped."""
    EVALUATE = 2
    """Forward passes whose losses alone are reported."""
    CREDIT = 3
    """No command: a backward pass of the step, which the number names, has ended."""

    BOUNDARY = 4
    """All ranks of the job obey orders, as a pause, before the next step."""
    REPEAT = 5
    """The passes of the newest TRAIN once more, captured, with the same microbatches, weights and random states."""


class Split(enum.IntEnum):
    """Samples that an evaluation reads."""

    VALIDATION = 0
    TEST = 1
    PROBES = 2
    """Fixed texts, whose passes are captured."""


_COUNT_BITS, _SPLIT_BITS, _MODE_BITS, _VERSION_BITS = 24, 2, 2, 24
VERSIONS = 1 << _VERSION_BITS
"""Number of different versions of the weights in orders."""
_MODES = tuple(ShipMode)


class Order(NamedTuple):
    """A command with its arguments."""

    command: Command
    num_microbatches: int = 0
    """For END the exit code of the backward ranks, for CREDIT the microbatch of the pass."""
    split: Split = Split.VALIDATION
    sends_weights: bool = False
    """Weights have changed since the last command, and follow."""
    ship: ShipMode = ShipMode.SAVED
    """Mode of shipping of a training step."""
    version: int = 0
    """Optimizer steps of the weights that the passes use, modulo 2^24; for CREDIT the chunk of the pass."""

    @classmethod
    def credit(cls, microbatch: int, chunk: int) -> Self:
        """Return the credit for a backward pass that has ended."""
        return cls(Command.CREDIT, microbatch, version=chunk)

    @property
    def ended(self) -> tuple[int, int]:
        """Return microbatch and chunk of the pass that a credit is for."""
        return self.num_microbatches, self.version

    @property
    def trains(self) -> bool:
        """Return whether backward passes follow the forward passes."""
        return self.command in {Command.TRAIN, Command.REPEAT}

    def pack(self) -> int:
        """Return the order as a number of 64 bits."""
        number = self.command << 1 | self.sends_weights
        for value, bits in (
            (self.version, _VERSION_BITS),
            (_MODES.index(self.ship), _MODE_BITS),
            (self.split, _SPLIT_BITS),
            (self.num_microbatches, _COUNT_BITS),
        ):
            number = number << bits | value
        return number

    @classmethod
    def unpack(cls, number: int) -> Self:
        """Return the order that `pack` made a number of."""
        fields = []
        for bits in (_COUNT_BITS, _SPLIT_BITS, _MODE_BITS, _VERSION_BITS):
            fields.append(number & (1 << bits) - 1)
            number >>= bits
        count, split, mode, version = fields
        return cls(Command(number >> 1), count, Split(split), bool(number & 1), _MODES[mode], version)
