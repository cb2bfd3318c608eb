"""Values of `--data-path`, `--train-data-path`, ...: prefixes, with weights or without."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatronapp_trainer.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Blend:
    """Corpora to draw from. Without weights each is used in proportion to its size."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None

    def for_megatron(self) -> tuple[list[str], list[float] | None]:
        """Return prefixes and weights for megatron-core's dataset configuration."""
        return list(self.prefixes), None if self.weights is None else list(self.weights)


def parse_blend(arguments: Sequence[str], flag: str) -> Blend:
    """Parse `PREFIX ...` or `WEIGHT PREFIX WEIGHT PREFIX ...`.

    Raises:
        UsageError: weights and prefixes do not alternate, or a weight is not positive.
    """
    numbers = [_number(argument) for argument in arguments]
    if all(number is None for number in numbers):
        return Blend(prefixes=tuple(arguments), weights=None)
    weights = [number for number in numbers[::2] if number is not None]
    alternating = (
        len(arguments) % 2 == 0 and len(weights) * 2 == len(arguments) and all(n is None for n in numbers[1::2])
    )
    if not alternating:
        raise UsageError(f"{flag}: give PREFIX, several PREFIXes, or WEIGHT PREFIX pairs, not {' '.join(arguments)}")
    if min(weights) <= 0:
        raise UsageError(f"{flag}: weights must be above 0")
    return Blend(prefixes=tuple(arguments[1::2]), weights=tuple(weights))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def split_fractions(split: str) -> tuple[float, float, float]:
    """Parse the fractions of training, validation and test, and scale them to a sum of 1.

    Raises:
        UsageError: not one to three numbers of 0 or more, or all of them 0.
    """
    numbers = split.split(",")
    fractions = [number for text in numbers if (number := _number(text)) is not None and number >= 0]
    if len(fractions) != len(numbers) or len(fractions) > 3 or sum(fractions) <= 0:
        raise UsageError(f"--split {split}: give up to three fractions of 0 or more, such as 969,30,1")
    total = sum(fractions)
    train, valid, test = (fraction / total for fraction in [*fractions, 0.0, 0.0][:3])
    return train, valid, test
