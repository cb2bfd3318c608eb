"""Inputs of the layers in a step: tokens, positions, and rows of the cache, int64 [3, N]."""

from collections.abc import Sequence

import torch

from megatronapp_trainer.device import Device
from megatronapp_trainer.inference.model.kv_cache import KvCacheShape
from megatronapp_trainer.inference.step_plan import StepPlan


class StepInputs:
    """Inputs of the steps of one rank. Those of decode steps are at fixed addresses, which CUDA graphs read."""

    def __init__(self, shape: KvCacheShape, device: Device) -> None:
        self._shape = shape
        self._device = device
        self._decode: dict[int, torch.Tensor] = {}
        """Buffers [3, B] of decode steps by their number of slots."""
        self._moved: tuple[int, tuple[int, ...]] | None = None
        """Slots, and those in use, of the steps ahead that the two tensors are for."""
        self._moved_3B = torch.empty(0)
        """Differences of the inputs of a step ahead and the step before."""
        self._places_N = torch.empty(0)
        """Slots of its tokens."""

    def of_prompts(self, plan: StepPlan) -> torch.Tensor:
        """Return the inputs of a step that reads prompts, on the device."""
        tokens = [token for segment in plan.segments for token in segment.tokens]
        places = [
            (segment.slot, position) for segment in plan.segments for position in range(segment.start, segment.end)
        ]
        return self._device.to_device(self._on_host(tokens, places))

    def of_slots(self, slots: int) -> torch.Tensor:
        """Return the inputs [3, B] of the last decode step with this number of slots."""
        return self._decode[slots]

    def fill(self, plan: StepPlan, slots: int) -> None:
        """Write a decode step into the buffer of this size. Rows of idle slots are never read."""
        used = {segment.slot: segment for segment in plan.segments}
        tokens = [used[slot].tokens[0] if slot in used else 0 for slot in range(slots)]
        places = [(slot, used[slot].start if slot in used else self._shape.capacity) for slot in range(slots)]
        inputs_3B = self._on_host(tokens, places)
        inputs_3B[1].masked_fill_(inputs_3B[1] == self._shape.capacity, 0)
        if slots not in self._decode:
            self._decode[slots] = torch.zeros(3, slots, dtype=torch.int64, device=self._device.torch_device)
        source = inputs_3B.pin_memory() if self._device.is_cuda else inputs_3B
        self._decode[slots].copy_(source, non_blocking=True)

    def advance(self, plan: StepPlan, slots: int, token_N: torch.Tensor) -> None:
        """Move the buffer of this size to the next position of each sequence, with the tokens that its step chose."""
        used = tuple(segment.slot for segment in plan.segments)
        if self._moved != (slots, used):
            moved_3B = torch.zeros(3, slots, dtype=torch.int64)
            moved_3B[1:, list(used)] = 1
            self._moved = slots, used
            self._moved_3B = self._device.to_device(moved_3B)
            self._places_N = self._device.to_device(torch.tensor(used, dtype=torch.int64))
        self._decode[slots].add_(self._moved_3B)
        self._decode[slots][0].index_copy_(0, self._places_N, token_N)

    def _on_host(self, tokens: Sequence[int], places: Sequence[tuple[int, int]]) -> torch.Tensor:
        rows = [slot * self._shape.rows_per_slot + position for slot, position in places]
        return torch.tensor([list(tokens), [position for _, position in places], rows])
