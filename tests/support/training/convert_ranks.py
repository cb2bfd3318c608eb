"""Logits of our model on a rank, after the trainer has loaded its weights."""

import json
import pathlib
from typing import Any

import convert_models as models

TRAINING = "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --finetune"


def configure(flags: list[str]) -> tuple[Any, Any]:
    """Configuration and layout of this rank."""
    from megatronapp_trainer.config import parse
    from megatronapp_trainer.training.build import layout_of

    config = parse([*TRAINING.split(), *flags])
    return config, layout_of(config)


def loaded_logits(config: Any, layout: Any, device: Any, tokens: Any) -> Any:
    """[B, S, padded V] of the checkpoint that --load names, on the last stage; None on the others."""
    from megatronapp_trainer.checkpoint.manager import CheckpointManager
    from megatronapp_trainer.training.build import build_run, vocab_size_of

    run = build_run(config, layout, device, vocab_size=vocab_size_of(config))
    assert CheckpointManager(config, layout).load(run.state)
    return forward(run, layout, tokens)


def forward(run: Any, layout: Any, tokens: Any) -> Any:
    """The forward pass through all stages, without dropout."""
    import torch
    import torch.distributed as dist

    model = run.state.chunks[0]
    while hasattr(model, "module"):
        model = model.module
    model.eval()
    batch, length = tokens.shape
    positions = torch.arange(length).expand(batch, length)
    stride = layout.world_size // layout.pipeline_size
    with torch.no_grad():
        if not layout.is_first_stage:
            shards = layout.tensor_size if run.config.parallel.sequence_parallel else 1
            hidden = torch.empty(length // shards, batch, run.config.model.hidden_size)
            dist.recv(hidden, layout.rank - stride)
            model.set_input_tensor(hidden)
        output = model(tokens, positions, None)
        if not layout.is_last_stage:
            dist.send(output.contiguous(), layout.rank + stride)
            return None
    return gathered(output, layout)


def gathered(logits: Any, layout: Any) -> Any:
    """The vocabularies of all tensor ranks side by side."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    parts = [torch.empty_like(logits) for _ in range(layout.tensor_size)]
    dist.all_gather(parts, logits.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, -1)


def logit_differences(root: pathlib.Path, names: tuple[str, ...], flags: str) -> dict[str, float]:
    """Largest difference of the logits of `root/NAME/ours` from `root/NAME/logits`, on ranks that compute logits."""
    import torch

    from megatronapp_trainer.checkpoint.arguments import model_flags
    from megatronapp_trainer.device import prepare_device
    from megatronapp_trainer.parallel.groups import destroy_groups, initialize_groups

    found: dict[str, float] = {}
    for index, name in enumerate(names):
        ours = root / name / "ours"
        manifest = json.loads((ours / "iter_0000000" / "megatronapp.json").read_text())
        config, layout = configure([*model_flags(manifest["arguments"]), *flags.split(), "--load", str(ours)])
        device = prepare_device(layout.local_rank)
        if index == 0:
            initialize_groups(config, layout, device)
        logits = loaded_logits(config, layout, device, models.tokens())
        if logits is not None:
            vocabulary = manifest["arguments"]["--vocab-size"]
            expected = torch.load(root / name / "logits")
            found[name] = float((logits[..., :vocabulary] - expected).abs().max())
    destroy_groups()
    return found
