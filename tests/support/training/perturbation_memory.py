"""Memory of perturbed activations in a pass of a training: what autograd stores, and the estimate."""

from typing import Any

import torch
from perturbed_training import SMALL
from perturbing_ranks import recipe


def added_and_estimated(flags: str, perturbations: list[dict[str, Any]]) -> tuple[int, int]:
    """Bytes that a recipe adds to what a pass of one rank holds for its backward pass, and the estimate of them."""
    import small_training

    from megatronapp_trainer.perturbation.model_shard import model_shard_of
    from megatronapp_trainer.perturbation.training import trained_activations, training_memory
    from megatronapp_trainer.perturbation.training.trained_perturbation import model_of

    run = small_training.prepare(f"{SMALL} {flags}")
    samples, length = run.config.training.micro_batch_size, run.config.model.seq_length
    model = model_of(run.state.chunks[0])
    shard = model_shard_of(model, run.layout, vocabulary=120)
    plan = trained_activations.SamplePlan(micro_batch_size=samples, seq_length=length, data_rank=0, data_size=1)
    tokens = torch.arange(samples * length).view(samples, length) % 120
    places = torch.arange(length).expand(samples, -1)

    def measured() -> int:
        storages: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run.state.chunks[0](tokens, places, None, labels=tokens)
        return sum(storage.nbytes() for storage in storages.values())

    before = measured()
    found = recipe(*perturbations)
    activations = trained_activations.TrainingActivations(found, [model], shard, plan)
    activations.install(0, 0)
    added = measured() - before
    memory = training_memory.TrainingMemory(
        shard=shard,
        tokens=samples * length,
        sequence_parallel=False,
        recomputed_layers=None,
        master_parts=1,
        peak=sum,
        free_bytes=lambda: 0,
    )
    return added, memory.activation_bytes(found, [model])
