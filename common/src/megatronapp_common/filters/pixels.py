"""Cutting a vector into pixels, the same ones for every layout.

Where the edges are follows from width and number of pixels alone. A layout that shards the vector fits if none of its
own edges falls inside a pixel, or if every pixel is made of whole shards; others are refused.
"""

from megatronapp_common.errors import ReductionPlanError


def pixel_edges(width: int, pixels: int) -> tuple[int, ...]:
    """The `pixels` + 1 edges, whose distances differ by one at most. Raises PlanError."""
    if not 1 <= pixels <= width:
        raise ReductionPlanError(f"{pixels} pixels of a vector of {width} numbers are not possible; write 1 to {width}")
    return tuple(index * width // pixels for index in range(pixels + 1))


def shard_edges(width: int, shards: int) -> tuple[int, ...]:
    """The `shards` + 1 edges of equal shards. Raises PlanError."""
    if shards < 1 or width % shards:
        raise ReductionPlanError(f"a vector of {width} numbers has no {shards} equal shards; use a divisor of {width}")
    return tuple(range(0, width + 1, width // shards))


def merges(width: int, pixels: int, shards: int) -> bool:
    """Whether pixels are made of several shards each (else each lies within one). Raises PlanError."""
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
    """The number of pixels nearest to `wanted` that fits these shards, and any number of shards that divides theirs.

    Of two that are as near the larger one. Raises PlanError.
    """
    shard_edges(width, shards)
    multiple = wanted - wanted % shards
    several = {count for count in (multiple, multiple + shards) if 0 < count <= width} or {width - width % shards}
    layouts = [count for count in range(1, shards + 1) if shards % count == 0]
    parts = {count for count in layouts if all(count % other == 0 or other % count == 0 for other in layouts)}
    return min(several | parts, key=lambda count: (abs(count - wanted), -count))
