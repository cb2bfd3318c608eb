"""Forward passes at the start, on an example of the data: a backward rank builds its graphs by them, and a forward
rank learns what its passes save.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from megatron.core.tensor_parallel.random import _fork_rng

from megatronapp_trainer.config.fbd import ShipMode
from megatronapp_trainer.data.microbatches import chunks_that_need_data
from megatronapp_trainer.fbd.channels.plan import activation_spec
from megatronapp_trainer.fbd.forward_passes import run_forward
from megatronapp_trainer.fbd.graph.backward_graph import BackwardGraph
from megatronapp_trainer.fbd.graph.recorder import learn_saved_tensors
from megatronapp_trainer.fbd.graph.saved_tensors import SavedTensors
from megatronapp_trainer.fbd.ship_modes import ShipSwitch
from megatronapp_trainer.fbd.stage import Stage
from megatronapp_trainer.models.registry import model_family
from megatronapp_trainer.training.build import TrainingRun

T = TypeVar("T")


class ExamplePasses:
    """Runs forward passes of a rank's chunks under each mode of shipping; random states are those of before."""

    def __init__(self, run: TrainingRun, stage: Stage) -> None:
        """Take a run with its weights, which the passes do not change."""
        self._run = run
        self._stage = stage
        self._family = model_family(run.config)
        self._switch = ShipSwitch(run.config, run.state.chunks)

    def graphs(self) -> dict[ShipMode, list[BackwardGraph]]:
        """Build the graph of each chunk for each mode."""
        return self._in_each_mode(
            lambda chunk, module: BackwardGraph(module.module, self._program(chunk, module), self._input(chunk))
        )

    def saved_tensors(self) -> dict[ShipMode, list[SavedTensors]]:
        """Return what a pass through each chunk saves in each mode."""
        return self._in_each_mode(self._learned)

    def _in_each_mode(self, of_chunk: Callable[[int, Any], T]) -> dict[ShipMode, list[T]]:
        found = {}
        for mode in self._run.config.ship_modes:
            self._switch.set(mode)
            with _fork_rng():
                found[mode] = [of_chunk(chunk, module) for chunk, module in enumerate(self._run.state.chunks)]
        return found

    def _learned(self, chunk: int, module: Any) -> SavedTensors:  # noqa: ANN401 - model chunk
        received, forward = self._input(chunk), self._program(chunk, module)
        saved, _ = learn_saved_tensors(module, lambda: forward(None if received is None else received.requires_grad_()))
        return saved

    def _program(self, chunk: int, module: Any) -> Callable[[torch.Tensor | None], torch.Tensor]:  # noqa: ANN401
        """Return the forward pass of a chunk on an example of its data."""
        run = self._run
        needs_data = chunk in chunks_that_need_data(run.config, run.layout)
        batch = self._family.example_batch(run.config, run.layout, run.device) if needs_data else None

        def forward(received: torch.Tensor | None) -> torch.Tensor:
            return run_forward(self._family, module, batch, received, is_last_stage=self._stage.is_last(chunk)).output

        return forward

    def _input(self, chunk: int) -> torch.Tensor | None:
        if self._stage.is_first(chunk):
            return None
        spec = activation_spec(self._run.config, self._run.layout)
        return torch.zeros(spec.shape, dtype=spec.dtype, device=self._run.device.torch_device)
