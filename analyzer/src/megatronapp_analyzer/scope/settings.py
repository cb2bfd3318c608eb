"""Settings of MegaScope in one hub."""

import dataclasses

RING_BYTES = 256 << 20
MAX_RUNS = 32
"""Runs that are stored; beyond, the oldest that has ended is removed first."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScopeSettings:
    """The job, where its frames are from (`live` or `replay`), and limits of what is stored."""

    job: str
    source: str = "live"
    ring_bytes: int = RING_BYTES
    runs: int = MAX_RUNS
