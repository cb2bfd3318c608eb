"""The language-model loss, and its reduction over the world, which also carries the request to stop."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatronapp_trainer.device import Device
from megatronapp_trainer.device.place import HostCopy
from megatronapp_trainer.errors import NotFiniteError
from megatronapp_trainer.parallel.layout import Layout

_ADVICE = (
    "Try a lower --lr or a longer warm-up, check the data of this step, "
    "or continue with --no-check-for-nan-in-loss-and-grad"
)


def token_loss(
    losses: torch.Tensor, loss_mask: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reduce per-token losses and mask [B, S], with the mask's sum, to the sum of losses, that sum, and both as a
    report [2].

    The form of megatron-core's schedules that divide by the number of tokens themselves, in place: hence the copy.
    """
    total = torch.sum(losses.float().view(-1) * loss_mask.view(-1))
    return total, tokens.to(torch.int), torch.stack((total.detach(), tokens))


def losses_by_source(losses: torch.Tensor, loss_mask: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    """Sum per-token losses [B, S] and their mask by source; `sources`: float32 [B, N], 1 at that of a sample.

    Returns sum and count of each source as a report [2 N].
    """
    sums_B2 = torch.stack(((losses.detach().float() * loss_mask).sum(1), loss_mask.sum(1)), 1)
    return (sources.unsqueeze(2) * sums_B2.unsqueeze(1)).sum(0).flatten()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepLoss:
    """Result of a step that all ranks have after the reduction."""

    mean: float
    """Minimised sum: the mean over the unmasked tokens of the global batch, and the means of further losses."""
    by_name: Mapping[str, float]
    """Mean of each loss of the model family over all that it counts, without those that count nothing."""
    tokens: int
    stop: bool
    """True if any rank was asked to stop."""
    time_is_up: bool = False
    """True if any rank has reached its limit of training time."""
    save: bool = False
    """True if any rank was asked for a checkpoint."""
    is_saving: bool = False
    """True if any rank still works on the checkpoint in the background."""
    announced: tuple[float, ...] = ()
    """Sums over all ranks of the figures that they announced."""
    further: tuple[float, ...] = ()
    """Sums over all ranks of the further figures that were given to the reduction."""


class PendingLossReduction:
    """A reduction whose result is being copied to the host."""

    def __init__(
        self,
        copy: HostCopy,
        reports: torch.Tensor | None,
        names: Sequence[str],
        further: int = 0,
        *,
        announced: int = 0,
        minimised: int | None = None,
    ) -> None:
        """Take the copy, in which `announced` and then `further` more figures follow the losses and requests.

        `minimised`: number of the losses, the first ones, that are; None: all.
        """
        self._minimised = minimised
        self._copy = copy
        self._reports = reports
        self._names = names
        self._announced = announced
        self._further = further

    def read(self) -> StepLoss:
        """Wait for the result, which is equal on all ranks."""
        values = self._copy.read().tolist()
        end = len(values) - self._further
        requests_end = end - self._announced
        *sums, stops, time_outs, saving, saves = values[:requests_end]
        totals, counts = sums[::2], sums[1::2]
        means = [total / max(count, 1.0) for total, count in zip(totals, counts, strict=True)]
        counted = zip(self._names, means, counts, strict=True)
        return StepLoss(
            mean=sum(means[: self._minimised]),
            by_name={name: mean for name, mean, count in counted if count > 0},
            tokens=int(counts[0]),
            stop=stops > 0,
            time_is_up=time_outs > 0,
            is_saving=saving > 0,
            save=saves > 0,
            announced=tuple(values[requests_end:end]),
            further=tuple(values[end:]),
        )

    def bad_microbatches(self) -> list[int]:
        """Return the microbatches of this rank whose loss is NaN or Inf; reads from the device, for the failure path
        only.
        """
        if self._reports is None:
            return []
        finite = torch.isfinite(self._reports).all(1)
        return torch.nonzero(~finite).flatten().tolist()


def reduce_loss(
    reports: list[torch.Tensor],
    layout: Layout,
    device: Device,
    *,
    names: Sequence[str],
    stop: bool = False,
    time_is_up: bool = False,
    is_saving: bool = False,
    save: bool = False,
    announced: Sequence[float] = (),
    further: torch.Tensor | None = None,
    minimised: int | None = None,
) -> PendingLossReduction:
    """Sum losses, their counts and requests to stop over the world; starts the copy to the host and returns.

    `names`: those of the family's losses; a report has the sum and the count of each, and the first `minimised` are
    minimised (None: all). `announced`: more figures of this rank to sum with them, copied to the device unless all are
    0, without waiting for it. `further`: figures that are there, fp64 of one axis.

    Megatron averages the loss over the last stage's replicas. Including all ranks costs no further collective and lets
    them agree on stopping or saving at the same step boundary, whichever of them got the signal, and on the end of
    writes (`is_saving`).
    """
    stacked = torch.stack(reports) if reports else None
    requests = (stop, time_is_up, is_saving, save, *announced)
    vector = torch.zeros(2 * len(names) + len(requests), dtype=torch.float64, device=device.torch_device)
    if stacked is not None and layout.tensor_rank == 0:
        vector[: -len(requests)] = stacked.double().sum(0)
    if any(requests):
        vector[-len(requests) :] = device.to_device(torch.tensor(requests, dtype=torch.float64))
    if further is not None:
        vector = torch.cat((vector, further))
    dist.all_reduce(vector)
    count = 0 if further is None else further.numel()
    return PendingLossReduction(
        device.to_host(vector), stacked, names, count, announced=len(announced), minimised=minimised
    )


def refuse_infinite_gradients(grad_norm: float, *, step: int) -> None:
    """Raise NotFiniteError if the norm of all gradients, the same on every rank, is NaN or Inf."""
    if not math.isfinite(grad_norm):
        raise NotFiniteError(
            f"the gradient norm of step {step} is {grad_norm} although its loss is finite. The weights are those "
            f"before this step; no checkpoint of it was written. {_ADVICE}"
        )


def refuse_not_finite(loss: StepLoss, pending: PendingLossReduction, layout: Layout, *, step: int) -> None:
    """Raise NotFiniteError that names the ranks and microbatches; collective, as all ranks have the same mean."""
    if math.isfinite(loss.mean):
        return
    found: list[list[int]] = [[] for _ in range(layout.world_size)]
    dist.all_gather_object(found, pending.bad_microbatches())
    places = [
        f"rank {layout.global_rank_of(rank)}, microbatch {number}"
        for rank, numbers in enumerate(found)
        for number in numbers[:1]
    ]
    where = "; ".join(places) or "the sum overflowed although each microbatch is finite"
    raise NotFiniteError(
        f"the loss of step {step} is {loss.mean} ({where}). The weights are those before this step; "
        f"no checkpoint of it was written. {_ADVICE}"
    )
