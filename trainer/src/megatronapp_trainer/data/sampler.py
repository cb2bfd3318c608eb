"""Order of samples over replicas. Pure and without state: a resume at another number of replicas is exact.

Microbatch `i` since `consumed_samples` of replica `d` has the global samples `consumed + i * replicas * mbs + d * mbs +
k` for `k` below `mbs`, so that a step of any batch size takes the next `global batch` samples of one fixed order,
however many replicas read them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOrder:
    """Samples of one replica. `size`: samples of the dataset, after which its order starts again.

    `restart_after`: samples after which reading starts again even if the dataset is longer. `counts_once`: samples
    beyond the dataset only fill up the last batch.
    """

    consumed_samples: int
    micro_batch_size: int
    data_rank: int
    data_size: int
    size: int
    restart_after: int | None = None
    counts_once: bool = False

    def indices(self, microbatch: int) -> list[int]:
        """Return the dataset indices of the `microbatch`-th microbatch since `consumed_samples`."""
        return [place % self.size for place in self._places(microbatch)]

    def counted(self, microbatch: int) -> list[bool]:
        """Return whether the loss of each sample of this microbatch counts."""
        return [not self.counts_once or place < self.size for place in self._places(microbatch)]

    def _places(self, microbatch: int) -> list[int]:
        first = self.consumed_samples + (microbatch * self.data_size + self.data_rank) * self.micro_batch_size
        period = self.restart_after or self.size
        return [(first + offset) % period for offset in range(self.micro_batch_size)]
