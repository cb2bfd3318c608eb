"""Commands of rank 0, carried out on every rank at a step boundary."""

from collections.abc import Sequence

import torch

from megatronapp_common.scope.protocol_requests import CaptureSettings
from megatronapp_trainer.device.cuda_graphs import GraphCache
from megatronapp_trainer.hooks.hook_collector import HookCollector
from megatronapp_trainer.scope.capture.capture_spec import capture_spec_of
from megatronapp_trainer.scope.capture.commands import (
    BeginProbe,
    BeginRun,
    CaptureCommand,
    ChangeRun,
    EndRun,
    SetBasis,
)
from megatronapp_trainer.scope.capture.rank_shard import RankShard
from megatronapp_trainer.scope.capture.reductions import PcaBasis, Reductions
from megatronapp_trainer.scope.capture.tracked_requests import ModelSizes, RequestTracker, tracked_probe, tracked_run
from megatronapp_trainer.scope.transfer.deferred_work import DeferredWork
from megatronapp_trainer.scope.transfer.device_copy import DeviceToHostCopier


class CommandHandler:
    """Begins, changes and ends what a rank captures. Used in the engine's thread only."""

    def __init__(
        self,
        shard: RankShard,
        *,
        tracker: RequestTracker,
        collector: HookCollector,
        reductions: Reductions,
        copier: DeviceToHostCopier,
        deferred: DeferredWork,
        graphs: GraphCache,
    ) -> None:
        self._shard = shard
        self._tracker = tracker
        self._collector = collector
        self._reductions = reductions
        self._copier = copier
        self._deferred = deferred
        self._graphs = graphs
        self._sizes = ModelSizes(layers=shard.num_layers, heads=shard.num_heads)

    def handle(self, command: CaptureCommand) -> None:
        """Carry out a command; one about an unknown run does nothing."""
        self._deferred.flush()
        match command:
            case BeginRun():
                self._begin_run(command.run, command.capture, command.lengths)
            case ChangeRun():
                if (tracked := self._tracker.get(command.run)) is not None:
                    tracked.capture, tracked.recipe = command.capture, capture_spec_of(command.capture)
            case EndRun():
                self._end_run(command.run)
            case BeginProbe():
                self._tracker.add(
                    tracked_probe(command.probe, command.sites, command.lengths, command.queries, command.stride)
                )
            case SetBasis():
                self._set_basis(command)

    def _begin_run(self, run: str, capture: CaptureSettings, lengths: Sequence[int]) -> None:
        self._tracker.add(tracked_run(run, capture, lengths, self._sizes))

    def _end_run(self, run: str) -> None:
        self._tracker.remove(run)
        self._reductions.drop(run)
        if self._tracker.is_empty:
            self._collector.remove()

    def _set_basis(self, command: SetBasis) -> None:
        first, end = self._shard.layers
        own = [place for place, layer in enumerate(command.layers) if first <= layer < end]
        layers = tuple(command.layers[place] for place in own)
        device = self._reductions.device
        self._reductions.basis = PcaBasis(
            version=command.version,
            layers=layers,
            places=torch.tensor([layer - first for layer in layers], dtype=torch.int64, device=device),
            mean_L1H=torch.from_numpy(command.mean[own].copy())[:, None].to(device),
            axes_LHC=torch.from_numpy(command.axes[own].copy()).transpose(1, 2).contiguous().to(device),
        )
        # Graphs have read the old basis until now, and have its addresses baked in.
        self._copier.wait()
        self._graphs.clear()
