"""State of a rank as its live tensors and small objects: what is copied into memory, and copied back.

A rank's own state is restored in the same layout with the same flags only, so that nothing is divided, gathered or
named: tensors are in the order in which model and optimizer hold them.
"""

import dataclasses
import hashlib
import itertools
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatronapp_trainer.checkpoint import random_states
from megatronapp_trainer.checkpoint.content import models_of
from megatronapp_trainer.checkpoint.optimizer_state import inner_optimizers, prepare_to_save
from megatronapp_trainer.checkpoint.saving.host_copy import places_of, tensor_at
from megatronapp_trainer.checkpoint.train_state import PerturbedSteps, TrainState
from megatronapp_trainer.errors import CheckpointError, UsageError

_PLAIN_FIELDS = ("iteration", "consumed_samples", "order_samples", "stream_state", "skipped_iterations")


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveState:
    """State of a rank at a step boundary."""

    tensors: list[torch.Tensor]
    """Tensors that only the next update changes, and copies of the others."""
    objects: bytes
    """Pickle of what is no tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _StateTensors:
    updated: list[torch.Tensor]
    """Weights, and the optimizer's own: nothing but an update changes them."""
    others: list[torch.Tensor]
    """Buffers of the model, which passes change, too."""
    steps: list[torch.Tensor]
    """Numbers of updates, one for each of the optimizer's parameters."""


def read_live_state(state: TrainState, text_tokens: bytes | None) -> LiveState:
    """Return what a save copies. Exchanges nothing. `text_tokens`: of the checkpoint manager."""
    prepare_to_save(state.optimizer)
    found = _tensors(state)
    objects = {
        "signature": _signature(found),
        "extra": [_extra_states(model) for model in models_of(state).values()],
        "optimizers": [_settings_of(part) for part in inner_optimizers(state.optimizer)],
        "scheduler": state.scheduler.state_dict(),
        "random": random_states.capture(),
        "plain": {name: getattr(state, name) for name in _PLAIN_FIELDS},
        "validation_due": state.validation_due,
        "perturbed": [dataclasses.asdict(entry) for entry in state.perturbed],
        "text_tokens": text_tokens,
    }
    others = [tensor.clone() for tensor in found.others]
    return LiveState(tensors=[*found.updated, *others, *_packed(found.steps)], objects=pickle.dumps(objects))


def payload_bytes(state: TrainState) -> int:
    """Return the bytes of all tensors of a save, with the padding between them."""
    prepare_to_save(state.optimizer)
    found = _tensors(state)
    return places_of([*found.updated, *found.others, *_packed(found.steps)])[1]


@torch.no_grad()
def restore_live_state(state: TrainState, content: torch.Tensor, objects: bytes) -> bytes | None:
    """Copy a save back; returns the text tokens. `content`: its bytes, on the host.

    Raises:
        CheckpointError: the tensors of this run are others.
    """
    prepare_to_save(state.optimizer)
    stored = pickle.loads(objects)
    found = _tensors(state)
    if stored["signature"] != _signature(found):
        raise CheckpointError(
            "the state in memory has other tensors than this run, although the flags are equal: another version of "
            "this product or of torch wrote it. Start again without it: delete the files *-memory-* of the job in "
            "shared memory"
        )
    steps = _packed(found.steps)
    live = [*found.updated, *found.others, *steps]
    places, _ = places_of(live)
    for tensor, place in zip(live, places, strict=True):
        tensor.copy_(tensor_at(content, place))
    for count, packed in zip(found.steps, itertools.chain(*steps), strict=True):
        count.copy_(packed)
    for model, extra in zip(models_of(state).values(), stored["extra"], strict=True):
        if extra:
            model.load_state_dict({**model.state_dict(), **extra})
    state.scheduler.load_state_dict(stored["scheduler"])
    for part, settings in zip(inner_optimizers(state.optimizer), stored["optimizers"], strict=True):
        _restore_settings(part, settings)
    for name in _PLAIN_FIELDS:
        setattr(state, name, stored["plain"][name])
    state.validation_due = stored["validation_due"]
    state.perturbed = [PerturbedSteps(**entry) for entry in stored["perturbed"]]
    random_states.restore(stored["random"])
    tokens: bytes | None = stored["text_tokens"]
    return tokens


def _tensors(state: TrainState) -> _StateTensors:
    updated: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for model in models_of(state).values():
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        for name in model.state_dict():
            if name in parameters:
                updated.append(parameters[name].detach())
            elif name in buffers:
                others.append(buffers[name].detach())
    weights = {tensor.untyped_storage().data_ptr() for tensor in updated}
    steps: list[torch.Tensor] = []
    for parameter, values in _optimizer_states(state.optimizer):
        if parameter.untyped_storage().data_ptr() not in weights:
            updated.append(parameter.detach())
        updated += [values["exp_avg"], values["exp_avg_sq"]]
        steps.append(values["step"])
    return _StateTensors(updated=updated, others=others, steps=steps)


def _optimizer_states(optimizer: Any) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:  # noqa: ANN401
    for part in inner_optimizers(optimizer):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                values = part.optimizer.state[parameter]
                if set(values) != {"step", "exp_avg", "exp_avg_sq"}:
                    raise UsageError(
                        "--non-persistent-save-interval copies the state of torch's Adam, and this run has "
                        f"{type(part.optimizer).__name__} with {', '.join(map(str, values)) or 'none'}; leave the flag "
                        "out"
                    )
                yield parameter, values


def _packed(steps: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the numbers of updates as one tensor, without a synchronisation with the device."""
    return [torch.stack([step.reshape(()) for step in steps])] if steps else []


def _signature(found: _StateTensors) -> str:
    texts = [
        f"{kind} {tuple(tensor.shape)} {tensor.dtype}"
        for kind, tensors in (("updated", found.updated), ("other", found.others), ("step", found.steps))
        for tensor in tensors
    ]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _extra_states(model: Any) -> dict[str, Any]:  # noqa: ANN401 - a module
    """Return what a model stores besides its tensors, such as scales of formats of 8 bits."""
    known = {name for name, _ in itertools.chain(model.named_parameters(), model.named_buffers())}
    known |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: value for name, value in model.state_dict().items() if name not in known and value is not None}


def _settings_of(part: Any) -> dict[str, Any]:  # noqa: ANN401 - MegatronOptimizer
    groups = [{name: value for name, value in group.items() if name != "params"} for group in part.param_groups]
    scaler = getattr(part, "grad_scaler", None)
    return {"groups": groups, "scaler": None if scaler is None else scaler.state_dict()}


def _restore_settings(part: Any, settings: dict[str, Any]) -> None:  # noqa: ANN401 - MegatronOptimizer
    for group, values in zip(part.param_groups, settings["groups"], strict=True):
        group.update(values)
    if settings["scaler"] is not None:
        part.grad_scaler.load_state_dict(settings["scaler"])
