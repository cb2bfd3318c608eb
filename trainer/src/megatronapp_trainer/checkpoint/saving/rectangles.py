"""Rectangles of a tensor that together are a range of its flat elements. Pure numbers, no torch.

The distributed optimizer gives each data-parallel rank a range of the flat elements of a parameter. torch's distributed
checkpoints store rectangles, which any layout can read. A range of a tensor of N axes is at most 2 N - 1 rectangles.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Rectangle:
    """A box of a tensor: first index and length along each axis."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Return the number of elements."""
        return math.prod(self.sizes)

    def overlap(self, other: "Rectangle") -> "Rectangle | None":
        """Return the common part of two boxes of one tensor, or None if they are apart."""
        bounds = [
            (max(start, other_start), min(start + size, other_start + other_size))
            for start, size, other_start, other_size in zip(
                self.offsets, self.sizes, other.offsets, other.sizes, strict=True
            )
        ]
        if any(end <= start for start, end in bounds):
            return None
        return Rectangle(offsets=tuple(start for start, _ in bounds), sizes=tuple(end - start for start, end in bounds))

    def within(self, outer: "Rectangle") -> tuple[slice, ...]:
        """Return the slices that select this box from a tensor that holds `outer` alone."""
        return tuple(
            slice(start - outer_start, start - outer_start + size)
            for start, size, outer_start in zip(self.offsets, self.sizes, outer.offsets, strict=True)
        )


def rectangles_of(shape: Sequence[int], start: int, end: int) -> Iterator[tuple[int, Rectangle]]:
    """Yield the boxes that make up the flat elements `start` to `end` of a tensor, with the first element of each.

    They are in the order of their elements, and the elements of each are contiguous.

    Raises:
        ValueError: the range is not within the tensor.
    """
    if not 0 <= start <= end <= math.prod(shape):
        raise ValueError(f"elements {start} to {end} are not within a tensor of shape {tuple(shape)}")
    if start < end:
        yield from _rectangles(tuple(shape), start, end, base=0, before=())


def _rectangles(
    shape: tuple[int, ...], start: int, end: int, *, base: int, before: tuple[int, ...]
) -> Iterator[tuple[int, Rectangle]]:
    """Yield the boxes of a part of a tensor: that at the indices `before`, whose first flat element is `base`."""
    single = (1,) * len(before)
    if len(shape) <= 1:
        offsets, sizes = ((start,), (end - start,)) if shape else ((), ())
        yield base + start, Rectangle(offsets=(*before, *offsets), sizes=(*single, *sizes))
        return
    rows, inner = shape[1:], math.prod(shape[1:])
    first, last = -(-start // inner), end // inner
    if first > last:  # within a row
        row = last
        yield from _rectangles(
            rows, start - row * inner, end - row * inner, base=base + row * inner, before=(*before, row)
        )
        return
    if start < first * inner:
        row = first - 1
        yield from _rectangles(rows, start - row * inner, inner, base=base + row * inner, before=(*before, row))
    if first < last:
        zeros = (0,) * len(rows)
        yield (
            base + first * inner,
            Rectangle(offsets=(*before, first, *zeros), sizes=(*single, last - first, *rows)),
        )
    if last * inner < end:
        yield from _rectangles(rows, 0, end - last * inner, base=base + last * inner, before=(*before, last))
