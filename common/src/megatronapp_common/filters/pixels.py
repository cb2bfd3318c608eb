"""Partition of a vector into pixels, the same ones for every layout.

The edges depend on width and number of pixels alone. A layout that shards the vector fits if none of its edges is
inside a pixel, or if every pixel consists of whole shards; others are refused.
"""

from megatronapp_common.errors import ReductionPlanError


def pixel_edges(width: int, pixels: int) -> tuple[int, ...]:
    """Return the `pixels` + 1 edges, whose distances differ by one at most. Raises ReductionPlanError."""
    if not 1 <= pixels <= width:
        raise ReductionPlanError(f"{pixels} pixels of a vector of {width} numbers are not possible; write 1 to {width}")
    return tuple(index * width // pixels for index in range(pixels + 1))


def shard_edges(width: int, shards: int) -> tuple[int, ...]:
    """Return the `shards` + 1 edges of equal shards. Raises ReductionPlanError."""
    if shards < 1 or width % shards:
        raise ReductionPlanError(f"a vector of {width} numbers has no {shards} equal shards; use a divisor of {width}")
    return tuple(range(0, width + 1, width // shards))


def merges(width: int, pixels: int, shards: int) -> bool:
    """Return true if each pixel consists of several shards, false if each is within one. Raises ReductionPlanError."""
    cuts, bounds = set(pixel_edges(width, pixels)), set(shard_edges(width, shards))
    if bounds <= cuts:
        return False
    if cuts <= bounds:
        return True
    inside = min(bounds - cuts)
    raise ReductionPlanError(
        f"with {pixels} pixels the edge between two shards, at {inside} of {width}, falls inside a pixel; "
        f"write {fitting_pixels(width, pixels, shards)} pixels, which fits {shards} shards"
    )


def fitting_pixels(width: int, wanted: int, shards: int) -> int:
    """Return the number of pixels nearest to `wanted` that fits these shards, and any divisor of their number.

    The larger one of two that are as near. Raises ReductionPlanError.
    """
    shard_edges(width, shards)
    multiple = wanted - wanted % shards
    several = {count for count in (multiple, multiple + shards) if 0 < count <= width} or {width - width % shards}
    layouts = [count for count in range(1, shards + 1) if shards % count == 0]
    parts = {count for count in layouts if all(count % other == 0 or other % count == 0 for other in layouts)}
    return min(several | parts, key=lambda count: (abs(count - wanted), -count))
