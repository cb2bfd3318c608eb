"""Training equals a GPT written in plain torch: masks, positions, weighting, clipping, decay, schedules, ties.

The layouts are compared with one another elsewhere; an error that they share would only be seen here.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import small_training

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]

LAYERS, HIDDEN, HEADS, GROUPS, LENGTH, STEPS = 2, 32, 4, 2, 16, 6
MODEL = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --group-query-attention "
    f"--num-query-groups {GROUPS} --seq-length {LENGTH} --max-position-embeddings 20 --vocab-size 61 --mock-data "
    "--make-vocab-size-divisible-by 4 "
    f"--micro-batch-size 2 --global-batch-size 8 --train-iters {STEPS} --eval-iters 0 --lr 1e-2 --min-lr 1e-3 "
    "--lr-decay-style cosine --lr-warmup-iters 2 --weight-decay-incr-style linear --start-weight-decay 0.1 "
    "--end-weight-decay 0.7 --clip-grad 0.6 --adam-beta2 0.95 --adam-eps 1e-6 --attention-dropout 0 --hidden-dropout 0"
)
PER_TOKEN = "--calculate-per-token-loss"
UNTIED = "--untie-embeddings-and-output-weights"
TOLERANCE = 2e-5


def documents(key: int) -> tuple[Any, Any, Any]:
    """Loss mask [S], positions [S] and hidden pairs [1, S, S] of a sample of several documents, some of it padding."""
    import torch

    generator = torch.Generator().manual_seed(key)
    ends = torch.rand(LENGTH, generator=generator) < 0.2
    number = torch.cumsum(ends, 0) - ends.long()
    starts = [int((number == document).nonzero()[0]) for document in number.tolist()]
    positions = torch.arange(LENGTH) - torch.tensor(starts)
    hidden = (number[:, None] != number[None, :]) | torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    padded = LENGTH - int(torch.randint(0, 12, (), generator=generator))
    return (~ends & (torch.arange(LENGTH) < padded)).float(), positions, hidden[None]


def with_documents(batches: Iterator[Any], replica: int, replicas: int) -> Iterator[Any]:
    """The same batches with the masks and positions of documents."""
    import torch

    first = replica * 2
    for batch in batches:
        found = [documents(first + row) for row in range(2)]
        mask, positions, hidden = (torch.stack(parts) for parts in zip(*found, strict=True))
        yield {**batch, "loss_mask": mask, "position_ids": positions, "attention_mask": hidden}
        first += 2 * replicas


def prepared(flags: str) -> tuple[Any, Iterator[Any]]:
    """A run whose batches hold documents, which samples of --mock-data do not."""
    from megatronapp_trainer.training.build import build_iterators

    run = small_training.prepare(f"{MODEL} {flags}")
    data = dataclasses.replace(run.config.data, reset_position_ids=True, reset_attention_mask=True)
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, data=data))
    train = build_iterators(run.config, run.layout, 0).train
    return run, with_documents(train, run.layout.data_rank, run.layout.data_size)


def trained(flags: str) -> list[float] | None:
    """Losses and gradient norms of all steps, on the reporting rank."""
    from megatronapp_trainer.data.microbatches import DataIterators

    run, batches = prepared(flags)
    recorder = small_training.train(run, iterators=DataIterators(train=batches, valid=None, test=None))
    return None if recorder is None else [*recorder.losses, *recorder.grad_norms]


def plainly_trained(flags: str) -> list[float]:
    """The same, of a loop in plain torch that begins with the same weights."""
    import torch

    run, batches = prepared(flags)
    (chunk,) = run.state.chunks
    weights = {
        name.removeprefix("module."): parameter.detach().clone().requires_grad_()
        for name, parameter in chunk.named_parameters()
    }
    assert any("q_layernorm" in name for name in weights) == ("--qk-layernorm" in flags)
    decayed = [weight for weight in weights.values() if weight.ndim > 1]
    others = [weight for weight in weights.values() if weight.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others}], betas=(0.9, 0.95), eps=1e-6)
    losses, norms = [], []
    for step in range(STEPS):
        micro = [next(batches) for _ in range(4)]
        sums = [(_losses(weights, batch) * batch["loss_mask"]).sum() for batch in micro]
        counts = [batch["loss_mask"].sum() for batch in micro]
        total, tokens = torch.stack(sums).sum(), torch.stack(counts).sum()
        means = [part / count.clamp(min=1) for part, count in zip(sums, counts, strict=True)]
        loss = total / tokens if PER_TOKEN in flags else torch.stack(means).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call] # of torch
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(weights.values()), 0.6)))
        losses.append(float(total / tokens))
        for group, decay in zip(optimizer.param_groups, (0.1 + 0.6 * step / STEPS, 0.0), strict=True):
            group["lr"], group["weight_decay"] = _rate(step), decay
        optimizer.step()
    return [*losses, *norms]


def _rate(step: int) -> float:
    if step <= 2:
        return 1e-2 * step / 2
    return 1e-3 + 0.5 * (1e-2 - 1e-3) * (math.cos(math.pi * (step - 2) / (STEPS - 2)) + 1)


def _losses(weights: dict[str, Any], batch: Any) -> Any:
    """Per-token losses [B, S] of a pre-norm GPT."""
    import torch
    from torch.nn import functional

    embedding = weights["embedding.word_embeddings.weight"]
    stream = embedding[batch["tokens"]] + weights["embedding.position_embeddings.weight"][batch["position_ids"]]
    for layer in range(LAYERS):
        own = {
            name.removeprefix(f"decoder.layers.{layer}."): weight
            for name, weight in weights.items()
            if name.startswith(f"decoder.layers.{layer}.")
        }

        def linear(name: str, values: Any, own: dict[str, Any] = own) -> Any:
            return functional.linear(values, own[f"{name}.weight"], own[f"{name}.bias"])

        def norm(name: str, values: Any, own: dict[str, Any] = own) -> Any:
            return functional.layer_norm(values, (HIDDEN,), own[f"{name}.weight"], own[f"{name}.bias"])

        def head_norm(name: str, values: Any, own: dict[str, Any] = own) -> Any:
            if f"{name}.weight" not in own:
                return values
            return functional.layer_norm(values, (HIDDEN // HEADS,), own[f"{name}.weight"], own[f"{name}.bias"])

        mixed = linear("self_attention.linear_qkv", norm("input_layernorm", stream))
        grouped = mixed.unflatten(-1, (GROUPS, HEADS // GROUPS + 2, HIDDEN // HEADS))
        query = grouped[..., :-2, :].flatten(2, 3)
        query, key = (
            head_norm(f"self_attention.{part}_layernorm", heads)
            for part, heads in (("q", query), ("k", grouped[..., -2, :]))
        )
        key, value = (heads.repeat_interleave(HEADS // GROUPS, dim=2) for heads in (key, grouped[..., -1, :]))
        scores = torch.einsum("bihd,bjhd->bhij", query, key) / math.sqrt(HIDDEN // HEADS)
        probabilities = scores.masked_fill(batch["attention_mask"], -math.inf).softmax(-1)
        attended = torch.einsum("bhij,bjhd->bihd", probabilities, value).flatten(2)
        stream = stream + linear("self_attention.linear_proj", attended)
        inner = functional.gelu(linear("mlp.linear_fc1", norm("pre_mlp_layernorm", stream)))
        stream = stream + linear("mlp.linear_fc2", inner)
    last = [weights[f"decoder.final_layernorm.{name}"] for name in ("weight", "bias")]
    logits = functional.layer_norm(stream, (HIDDEN,), *last) @ weights.get("output_layer.weight", embedding).T
    return functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")


@pytest.mark.full("two models and weightings", but=("tied",))
@pytest.mark.parametrize(
    "flags",
    [pytest.param("--qk-layernorm", id="tied"), pytest.param(f"{UNTIED} {PER_TOKEN}", id="untied-per-token")],
)
def test_training_equals_plain_torch(run_ranks: RunRanks, flags: str) -> None:
    (plain,) = run_ranks(1, plainly_trained, flags)
    assert max(plain[STEPS:]) > 0.6, "nothing is clipped"
    pairs = "--use-distributed-optimizer --tensor-model-parallel-size 2 --sequence-parallel"
    for world, layout in ((1, ""), (2, "--pipeline-model-parallel-size 2"), (4, pairs)):
        (found,) = [values for values in run_ranks(world, trained, f"{flags} {layout}") if values is not None]
        assert found == pytest.approx(plain, rel=TOLERANCE), layout
