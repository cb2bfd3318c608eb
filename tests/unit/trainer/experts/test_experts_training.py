"""Mixtures of experts train as plain torch does, and alike in every layout and schedule."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import small_training
from pytest_workers import FULL

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]
Figures = tuple[list[float], list[float], list[Any]]

LAYERS, EXPERTS, STEPS = 4, 4, 6 if FULL else 3
MODEL = (
    f"--num-layers {LAYERS} --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 61 --mock-data "
    "--make-vocab-size-divisible-by 4 --micro-batch-size 2 --global-batch-size 8 --eval-iters 0 "
    f"--train-iters {STEPS} --lr 1e-2 --lr-decay-style constant --clip-grad 0.6 --weight-decay 0.1 --adam-beta2 0.95 "
    "--adam-eps 1e-6 --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.2 --normalization RMSNorm --swiglu "
    f"--disable-bias-linear --ffn-hidden-size 64 --num-experts {EXPERTS} --moe-ffn-hidden-size 24"
)
LOSSES = "--moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.02"
SHARED = "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate --moe-layer-freq [0]+[1]*3"
FULL_MODEL = f"{LOSSES} {SHARED}"
ALL_TO_ALL = "--moe-token-dispatcher-type alltoall"
EP = "--expert-model-parallel-size 2"
TP = "--tensor-model-parallel-size 2 --sequence-parallel"
RECOMPUTED_PARTS = "--recompute-granularity selective --recompute-modules core_attn moe shared_experts"
SHARDED = "--use-distributed-optimizer"
TOLERANCE = 2e-5


@dataclasses.dataclass
class ExpertsRecorder:
    """Losses, gradient norms, and figures of the experts of each step."""

    losses: list[float] = dataclasses.field(default_factory=list)
    grad_norms: list[float] = dataclasses.field(default_factory=list)
    experts: list[Any] = dataclasses.field(default_factory=list)

    def step(self, metrics: Any, *, experts: Any, **_details: object) -> None:
        self.losses.append(metrics.loss)
        self.grad_norms.append(metrics.grad_norm)
        self.experts.append((dict(experts.losses), experts.load, experts.dropped))

    def state(self, state: str) -> None: ...


def trained(flags: str) -> Figures | None:
    """Figures of a run, on the reporting rank."""
    from megatronapp_trainer.parallel.groups import destroy_groups

    run = small_training.prepare(f"{MODEL} {flags}")
    recorder = ExpertsRecorder() if run.layout.is_reporter else None
    small_training.trainer_of(run, reporter=recorder).train()
    destroy_groups()
    return None if recorder is None else (recorder.losses, recorder.grad_norms, recorder.experts)


def figures_of(run_ranks: RunRanks, world: int, flags: str) -> Figures:
    (found,) = [result for result in run_ranks(world, trained, flags) if result is not None]
    losses, norms, experts = found
    return losses, norms, experts


@pytest.fixture(scope="module")
def alone(run_ranks: RunRanks) -> Callable[[str], Figures]:
    """Figures of one process, once for each set of flags."""
    return functools.cache(functools.partial(figures_of, run_ranks, 1))


def plainly_trained(flags: str, model: dict[str, Any]) -> tuple[list[float], list[float], list[Any]]:
    """The same of a loop in plain torch that begins with the same weights."""
    import torch
    from plain_experts import PlainExperts

    from megatronapp_trainer.training.build import build_iterators

    run = small_training.prepare(f"{MODEL} {flags}")
    batches = build_iterators(run.config, run.layout, 0).train
    (chunk,) = run.state.chunks
    weights = {
        name.removeprefix("module."): parameter.detach().clone().requires_grad_()
        for name, parameter in chunk.named_parameters()
    }
    plain = PlainExperts(layers=LAYERS, heads=4, **model)
    groups = [
        {"params": [weight for weight in weights.values() if weight.ndim > 1], "weight_decay": 0.1},
        {"params": [weight for weight in weights.values() if weight.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-6)
    losses, norms, loads = [], [], []
    for _ in range(STEPS):
        parts = [plain.losses(weights, next(batches)) for _ in range(4)]
        language = torch.stack([tokens.mean() for tokens, _, _ in parts]).mean()
        optimizer.zero_grad()
        (language + torch.stack([further for _, further, _ in parts]).mean()).backward()  # type: ignore[no-untyped-call] # of torch
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(weights.values()), 0.6)))
        losses.append(float(language))
        loads.append([sum(layer).tolist() for layer in zip(*(load for _, _, load in parts), strict=True)])
        optimizer.step()
    return losses, norms, loads


MODELS = {
    "plain": (LOSSES, {"aux": 0.1, "z": 0.02}),
    "shared": (FULL_MODEL, {"aux": 0.1, "z": 0.02, "dense_layers": (0,), "has_shared_gate": True}),
    "sequence-sigmoid": (
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1 --moe-router-score-function sigmoid",
        {"aux": 0.1, "per_sequence": True, "scores": "sigmoid"},
    ),
    "one-expert": ("--moe-router-topk 1 --moe-router-pre-softmax", {"topk": 1, "scores": "pre"}),
    "capacity": ("--moe-expert-capacity-factor 1.0", {"capacity": 1.0}),
}


@pytest.mark.full("a sweep of routers", but=("shared",))
@pytest.mark.parametrize(("flags", "model"), MODELS.values(), ids=list(MODELS))
def test_training_equals_plain_torch(run_ranks: RunRanks, alone: Any, flags: str, model: dict[str, Any]) -> None:
    ((losses, norms, loads),) = run_ranks(1, plainly_trained, flags, {"topk": 2, **model})
    assert max(norms) > 0.6, "nothing is clipped"
    found_losses, found_norms, experts = alone(flags)
    assert found_losses == pytest.approx(losses, rel=TOLERANCE)
    assert found_norms == pytest.approx(norms, rel=1e-4)
    assert [list(map(list, load)) for _, load, _ in experts] == loads


def test_the_reported_losses_of_the_router_are_those_of_plain_torch(run_ranks: RunRanks, alone: Any) -> None:
    """Each coefficient alone, as plain torch adds the losses up."""
    _, _, experts = alone(FULL_MODEL)
    reported = experts[0][0]
    assert set(reported) == {"load_balancing_loss", "z_loss"}
    shape = {"topk": 2, "dense_layers": (0,), "has_shared_gate": True}
    ((aux, z),) = run_ranks(1, plain_router_losses, FULL_MODEL, shape)
    assert reported == pytest.approx({"load_balancing_loss": aux, "z_loss": z}, rel=1e-5)


def plain_router_losses(flags: str, shape: dict[str, Any]) -> tuple[float, float]:
    """Balancing loss and z-loss of the first step, means over microbatches and layers with experts."""
    from plain_experts import PlainExperts

    from megatronapp_trainer.training.build import build_iterators

    run = small_training.prepare(f"{MODEL} {flags}")
    batches = build_iterators(run.config, run.layout, 0).train
    taken = [next(batches) for _ in range(4)]
    (chunk,) = run.state.chunks
    weights = {name.removeprefix("module."): weight.detach() for name, weight in chunk.named_parameters()}
    means = []
    for name in ("aux", "z"):
        plain = PlainExperts(layers=LAYERS, heads=4, **{**shape, name: 1.0})
        means.append(sum(float(plain.losses(weights, batch)[1]) for batch in taken) / 4 / 3)
    return means[0], means[1]


LAYOUTS = {
    "DP2": (2, SHARDED),
    "EP2": (2, EP),
    "EP2-alltoall-sharded": (2, f"{EP} {ALL_TO_ALL} {SHARDED}"),
    "EP2xDP2": (4, f"{EP} {ALL_TO_ALL} {SHARDED} --overlap-grad-reduce --overlap-param-gather"),
    "TP2": (2, f"{TP} {ALL_TO_ALL}"),
    "TP2xEP2": (4, f"{TP} {EP} {ALL_TO_ALL} {SHARDED}"),
    "TP2xEP2-allgather": (4, f"{TP} {EP}"),
    "PP2xEP2": (4, f"--pipeline-model-parallel-size 2 {EP} {ALL_TO_ALL}"),
    "VPP2xEP2": (
        4,
        f"--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 {EP} {ALL_TO_ALL} {SHARDED}",
    ),
    "DPP": (2, f"--pipeline-model-parallel-size 2 --use-dpp {ALL_TO_ALL}"),
    "vee": (
        2,
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --use-dpp --dpp-placement vee "
        f"--dpp-schedule zero-bubble {ALL_TO_ALL}",
    ),
    "recompute": (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "recompute-parts": (1, RECOMPUTED_PARTS),
    "DPP-recompute-parts": (
        2,
        f"--pipeline-model-parallel-size 2 --use-dpp --dpp-schedule zero-bubble {ALL_TO_ALL} {RECOMPUTED_PARTS}",
    ),
    "local": (1, "--transformer-impl local"),
}


@pytest.mark.full("a sweep of layouts", but=("TP2xEP2", "VPP2xEP2"))
@pytest.mark.parametrize(("world", "layout"), LAYOUTS.values(), ids=list(LAYOUTS))
def test_layouts_agree_with_a_single_process(run_ranks: RunRanks, alone: Any, world: int, layout: str) -> None:
    losses, norms, experts = figures_of(run_ranks, world, f"{FULL_MODEL} {layout}")
    expected_losses, expected_norms, expected = alone(FULL_MODEL)
    assert losses == pytest.approx(expected_losses, rel=TOLERANCE)
    assert norms == pytest.approx(expected_norms, rel=1e-4)
    for (means, load, dropped), (expected_means, expected_load, _) in zip(experts, expected, strict=True):
        assert means == pytest.approx(expected_means, rel=1e-4)
        assert load == expected_load
        assert dropped == 0


FURTHER = {
    "per-token": f"{LOSSES} --calculate-per-token-loss",
    "bias": "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32",
    "padded": f"{LOSSES} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity {ALL_TO_ALL}",
    "sinkhorn": "--moe-router-load-balancing-type sinkhorn",
    "groups": f"{LOSSES} --moe-router-num-groups 2 --moe-router-group-topk 1",
}


@pytest.mark.full("further routers", but=("bias",))
@pytest.mark.parametrize("flags", FURTHER.values(), ids=list(FURTHER))
def test_experts_of_two_ranks_train_as_those_of_a_single_rank(run_ranks: RunRanks, alone: Any, flags: str) -> None:
    losses, norms, experts = figures_of(run_ranks, 2, f"{flags} {EP} {SHARDED}")
    expected = alone(flags)
    assert losses == pytest.approx(expected[0], rel=TOLERANCE)
    assert norms == pytest.approx(expected[1], rel=1e-4)
    assert [load for _, load, _ in experts] == [load for _, load, _ in expected[2]]


def test_losses_per_token_are_those_per_microbatch_where_every_token_counts(run_ranks: RunRanks, alone: Any) -> None:
    """A tensor rank has half of the tokens, and a sequence half of a microbatch's."""
    flags = (
        "--moe-router-load-balancing-type aux_loss seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.1 0.2 0.1 "
        "--moe-z-loss-coeff 0.02"
    )
    losses, norms, experts = figures_of(run_ranks, 2, f"{flags} {TP} {ALL_TO_ALL} --calculate-per-token-loss")
    expected = alone(flags)
    assert losses == pytest.approx(expected[0], rel=TOLERANCE)
    assert norms == pytest.approx(expected[1], rel=1e-4)
    assert experts[-1][0] == pytest.approx(expected[2][-1][0], rel=1e-4)


def test_padding_to_capacity_changes_no_loss_and_no_count(alone: Any) -> None:
    padded, plain = alone(FURTHER["padded"]), alone(f"{LOSSES} --moe-expert-capacity-factor 1.0")
    assert padded[0] == pytest.approx(plain[0], rel=TOLERANCE)
    assert padded[2][0][1:] == plain[2][0][1:]
    assert plain[2][0][2] > 0, "nothing is dropped"
