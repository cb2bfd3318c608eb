"""Evidence against the links of groups that reduce gradients and gather parameters, on devices."""

import numpy as np

from megatronapp_analyzer.detect.candidates import CauseEvidence
from megatronapp_analyzer.detect.causes.collective_transfers import CollectiveTransfers
from megatronapp_analyzer.detect.evidence_channels import DelayChannel
from megatronapp_analyzer.detect.features import Floats, Ints
from megatronapp_analyzer.detect.settings import DetectorSettings
from megatronapp_analyzer.detect.statistics.persistence import VoteWindow
from megatronapp_analyzer.model import Cause, JobLayout

Group = tuple[int, ...]


class GroupLinks:
    """Transfer times of groups, against their own healthy steps and groups that are alike."""

    def __init__(self, layout: JobLayout, settings: DetectorSettings) -> None:
        self._nodes = layout.nodes
        self._settings = settings
        self._columns: dict[tuple[Group, bool], int] = {}
        """By ranks and whether NCCL's records say how long transfers take: spans of collectives last longer."""
        self._channel = DelayChannel(np.empty(0, np.int64), settings)
        self._votes = VoteWindow(0, settings.votes)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Ranks of each column."""
        return tuple(group for group, _ in self._columns)

    def read(self, transfers: CollectiveTransfers, step_s: float) -> CauseEvidence:
        """Judge one step, whose usual length is `step_s`."""
        keys = zip(transfers.groups, transfers.groups_by_nccl.tolist(), strict=True)
        columns = [self._columns.setdefault(key, len(self._columns)) for key in keys]
        if len(self._columns) > self._votes.columns:
            self._channel.grow(self._peers())
            self._votes.grow(len(self._columns))
        seconds = np.full(len(self._columns), np.nan)
        seconds[columns] = transfers.groups_s
        noise = self._settings.device
        reading = self._channel.read(seconds, np.full(len(seconds), step_s), noise, np.zeros(len(seconds)))
        self._votes.add(reading.over, reading.known)
        return CauseEvidence(
            cause=Cause.LINK,
            over=reading.over,
            votes=self._votes.count,
            excess_s=reading.excess,
            occurrence_s=reading.excess,
            ratio=_ratio(seconds, reading.excess),
            strength=reading.strength,
            by_history=reading.by_history,
            harmful=reading.excess >= self._settings.harm * step_s,
        )

    def _peers(self) -> Ints:
        """Number the groups that are expected to take equally long: of a size, and all or none within one node."""
        kinds = [
            (len(group), len({self._nodes[rank] for rank in group}) == 1, by_nccl) for group, by_nccl in self._columns
        ]
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds)) if kinds.count(kind) > 1}
        return np.array([numbers.get(kind, -1) for kind in kinds], np.int64)


def _ratio(seconds: Floats, excess: Floats) -> Floats:
    """Return how many times longer than expected each takes; 1 where it is unknown."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = seconds / (seconds - excess)
    return np.where(np.isfinite(ratio) & (ratio > 1), ratio, 1.0)
