"""Preparation of a checkpoint by all ranks together: who writes what."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from megatronapp_trainer.checkpoint.saving.files import GlobalPlan, plan_of
from megatronapp_trainer.checkpoint.saving.rank_content import (
    RankContent,
    ReplicaDivision,
    Signature,
    rank_content,
    signature_of,
    split,
)
from megatronapp_trainer.parallel.agreement import Agreement, gather_from_all, gather_to_zero, on_rank_zero


class SharedPlan:
    """Plan of all checkpoints of a run. It is made once, and again if the tensors of a rank have changed."""

    def __init__(self) -> None:
        self._replicas = ReplicaDivision()
        self._signature: Signature | None = None
        self.whole: GlobalPlan | None = None
        """On rank 0: the items of all ranks."""
        self.version = 0
        """Number of times that the ranks have planned."""

    def prepare(self, content: dict[str, Any], parameters: Iterable[torch.Tensor]) -> RankContent:
        """Return what this rank writes of a sharded state; `parameters`: those of the model; collective.

        Raises:
            Exception: on every rank, if the state of one cannot be written or the ranks' parts do not fit together.
        """
        agreement = Agreement()
        found: list[_SplitState] = []
        with agreement.attempt():
            sharded, common = split(content)
            found.append(_SplitState(sharded, common, signature_of(sharded)))
        agreement.settle()
        (state,) = found
        changed = any(gather_from_all(state.signature != self._signature))
        if changed:
            self._replicas.divide(state.sharded)
        with agreement.attempt():
            self._replicas.apply(state.sharded)
            mine = rank_content(state.sharded, state.common, parameters)
        agreement.settle()
        if changed:
            everyone = gather_to_zero(mine.items)
            self.whole = on_rank_zero(lambda: plan_of(everyone or []))
            self._signature = state.signature
            self.version += 1
        return mine


@dataclasses.dataclass(frozen=True, slots=True)
class _SplitState:
    sharded: dict[str, Any]
    common: bytes
    signature: Signature
