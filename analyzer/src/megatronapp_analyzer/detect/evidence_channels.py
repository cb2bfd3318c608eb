"""Channels: one kind of evidence each, judged column by column against history, the others, or peers.

A reading gives for every column its excess over what is healthy. Culprits and persistence are decided later.
"""

import dataclasses

import numpy as np

from megatronapp_analyzer.detect.baseline import Mask, filled
from megatronapp_analyzer.detect.features import Floats, Ints
from megatronapp_analyzer.detect.settings import DetectorSettings, NoiseLevel
from megatronapp_analyzer.detect.statistics.two_references import ReferenceLimits, TwoReferences

SIGMA_CAP = 1.75
"""Noise never hides a slowdown beyond this factor; only persistence can hold it back."""
COUPLED_CAP = 2.0
"""The same for ranks that meet inside spans, where run-queue delays of network threads are not recorded."""
SHARE_CAP = 0.12
"""Noise never hides a delay beyond this part of a step."""
LARGEST_STEP = 0.05
"""Largest change, as a part of a step, that the level of a delay learns from."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChannelReading:
    """One step's judgement of every column of a channel."""

    known: Mask
    """Columns with a value and a reference."""
    over: Mask
    excess: Floats
    """Seconds beyond the expected value, per microbatch or message."""
    ratio: Floats
    """Value over expected value; 1 for delays, which have no scale of their own."""
    strength: Floats
    """Excess over its threshold: above 1 is over."""
    by_history: Mask
    """True where the column is judged by its own history, false where by peers."""

    def or_else(self, other: "ChannelReading") -> "ChannelReading":
        """Return this reading where it is known, and the other one in all other columns."""
        first = self.known
        return ChannelReading(
            known=first | other.known,
            over=np.where(first, self.over, other.over),
            excess=np.where(first, self.excess, other.excess),
            ratio=np.where(first, self.ratio, other.ratio),
            strength=np.where(first, self.strength, other.strength),
            by_history=np.where(first, self.by_history, other.by_history),
        )

    def within(self, columns: Mask) -> "ChannelReading":
        """Return the same reading with all other columns unknown."""
        return dataclasses.replace(
            self,
            known=self.known & columns,
            over=self.over & columns,
            excess=np.where(columns, self.excess, 0.0),
            ratio=np.where(columns, self.ratio, 1.0),
            strength=np.where(columns, self.strength, 0.0),
        )

    def at(self, columns: Ints) -> "ChannelReading":
        """Return the reading of `columns`, in that order."""
        return ChannelReading(**{field.name: getattr(self, field.name)[columns] for field in dataclasses.fields(self)})


class DelayChannel:
    """Seconds that should not be there (stalls, idle time, late delivery), as parts of a step."""

    def __init__(self, peers: Ints, settings: DetectorSettings, *, weight: float = 1.0, least_window: int = 1) -> None:
        """`peers` numbers the columns that do the same; -1 for those without peers.

        `weight` is a factor on the smallest delay that is named; `least_window` is the shortest number of steps that
        may be evidence.
        """
        self._weight = weight
        self._test = TwoReferences(peers, settings, least_window=least_window)

    def read(self, values_s: Floats, budget_s: Floats, noise: NoiseLevel, doubt_s: Floats) -> ChannelReading:
        """Judge one step.

        `budget_s` is the usual step time per occurrence of each column. `doubt_s` is the amount by which each value may
        be too large.
        """
        budget_s = np.where(budget_s > 0, budget_s, np.nan)
        with np.errstate(invalid="ignore"):
            parts, doubt = values_s / budget_s, filled(doubt_s / budget_s)
        limits = ReferenceLimits(
            floor=noise.share_floor,
            own=self._weight * noise.share,
            peers=self._weight * noise.cold_share,
            cap=self._weight * SHARE_CAP,
            peer_spread=noise.share_spread,
            least_peer_spread=noise.share_spread,
            largest_step=LARGEST_STEP,
        )
        found = self._test.read(parts, limits, lambda shift: doubt)
        excess: Floats = np.maximum(filled(found.size * budget_s), 0.0)
        return ChannelReading(
            known=found.known,
            over=found.over,
            excess=excess,
            ratio=np.ones(len(excess)),
            strength=found.strength,
            by_history=found.by_history,
        )

    def grow(self, peers: Ints) -> None:
        """Add columns for new peers."""
        self._test.grow(peers)
