"""Perturbed generation on devices: the noise of the processor, nulls and undone recipes, and CUDA graphs per recipe."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from generating_ranks import VARIANTS, config_of, generated, groups_of, model_of, open_engine
from perturbing_ranks import GAUSSIAN, PROMPTS, calculation, logits_of, recipe, request, run, storage

from megatronapp_common.scope.perturbation.recipe import Recipe
from megatronapp_trainer.hooks.perturbation.noise import element_block, noise_key
from megatronapp_trainer.hooks.perturbation.philox import normal, uniform
from megatronapp_trainer.inference.engine import Engine
from megatronapp_trainer.inference.perturbed_steps import PerturbedGraphs
from megatronapp_trainer.inference.worker_group import WorkerGroup

RunRanks = Callable[..., list[Any]]
Answers = dict[str, tuple[list[int], torch.Tensor]]
"""Tokens and logits of requests."""
SITES = ("embedding", "q", "k", "head_output", "attention_output", "mlp_in", "mlp1", "mlp2", "residual", "final_norm")
LOGITS_TOLERANCE = 2e-3
"""Largest difference of fp32 logits between devices, and between batches: those of the model are about 10."""


def recipes() -> list[Recipe | None]:
    """None, and recipes of all kinds and actions."""
    weak = {"type": "gaussian", "coefficient": 0.1}
    flips = {"type": "bitFlip", "bits": "mantissa", "rate": 0.1}
    ranges = [{"first": 2, "end": 4}, {"origin": "promptEnd", "first": -1}]
    return [
        None,
        recipe(
            calculation("mlp2", GAUSSIAN, layers=[0, 2]),
            calculation("q", weak, heads=[1, 3], positions=ranges),
            calculation("logits", weak),
            {"kind": "system", "action": {"type": "uniform", "coefficient": 0.4}},
        ),
        recipe(
            storage("mlp.linear_fc1", flips),
            storage("self_attention.linear_qkv", weak, part="key"),
            storage("embedding.word_embeddings", weak),
            calculation("mlp1", {"type": "mean", "over": "prompt"}, layers=[1]),
            calculation("head_output", {"type": "zero"}, heads=[2], steps={"first": 1}),
            {"kind": "system", "action": weak},
            seed=2,
        ),
    ]


def blocks() -> list[torch.Tensor]:
    """Return integers, uniform and normal numbers of the device, on the host."""
    with groups_of("") as (_, device):
        indices = torch.arange(1 << 20, dtype=torch.int64) * 65_537
        block = element_block(noise_key(5, "a"), indices.to(device.torch_device))
        return [number.cpu() for number in (*block, uniform(block.first), normal(block))]


def test_random_numbers_are_those_of_the_processor(run_ranks: RunRanks, on_processor: RunRanks) -> None:
    (found,), (expected,) = run_ranks(1, blocks), on_processor(1, blocks)
    assert all(torch.equal(*pair) for pair in zip(found[:-1], expected[:-1], strict=True))
    ulps = (found[-1].view(torch.int32).long() - expected[-1].view(torch.int32).long()).abs()
    assert int(ulps.max()) <= 1


def generate(flags: str, variant: str, graphs: Sequence[bool]) -> list[Answers] | None:
    """Answers of requests alone and together, with CUDA graphs and without; on rank 0."""
    with groups_of(flags) as (layout, device):
        config = config_of(f"{flags} {VARIANTS[variant]}")
        found = []
        for enabled in graphs:
            model = model_of(config, layout, device)
            gang, engine = open_engine(model, config, layout, device, fuse=False, cuda_graphs=enabled)
            if engine is None:
                gang.follow()
            else:
                found.append(answers(gang, engine))
                engine.close()
        return found if layout.rank == 0 else None


def answers(gang: WorkerGroup, engine: Engine) -> Answers:
    """Generate each request alone, then all together: of each recipe two, and two clean ones."""
    requests = [
        request(f"{kind}-{place}", perturbation, prompt=PROMPTS[place], temperature=1.0, seed=place, sample=place)
        for kind, perturbation in enumerate(recipes())
        for place in range(2)
    ]
    before = {name: parameter.clone() for name, parameter in gang.runner.model.named_parameters()}
    found: Answers = {}
    for mine in requests:
        events = run(engine, mine)
        found[f"{mine.id} alone"] = generated(events, mine.id), logits_of(events, mine.id).cpu()
    for mine in requests:
        engine.submit(mine)
    families = set()
    events = []
    while engine.is_busy:
        events += engine.step()
        families |= {type(family) for family in gang.runner._graphs._families}
    assert (PerturbedGraphs in families) is gang.runner.uses_graphs
    for mine in requests:
        found[mine.id] = generated(events, mine.id), logits_of(events, mine.id).cpu()
    after = dict(gang.runner.model.named_parameters())
    assert all(torch.equal(value, after[name]) for name, value in before.items()), "parameters are not undone"
    assert all(not module._forward_hooks for module in gang.runner.model.modules())
    return found


def check_equal(found: Answers, expected: Answers) -> None:
    for name, (tokens, logits) in expected.items():
        assert found[name][0] == tokens, name
        assert float((found[name][1] - logits).abs().max()) < LOGITS_TOLERANCE, name


@pytest.fixture(scope="module")
def expected(on_processor: RunRanks) -> Answers:
    """Answers of the processor, whose noise the unit tests check."""
    ((answers_of_processor,),) = on_processor(1, generate, "", "rotary-grouped", [False])
    found: Answers = answers_of_processor
    return found


def test_perturbed_tokens_are_those_of_the_processor(run_ranks: RunRanks, expected: Answers) -> None:
    ((with_graphs, eager),) = run_ranks(1, generate, "", "rotary-grouped", [True, False])
    check_equal(with_graphs, expected)
    check_equal(eager, expected)
    for name, answer in with_graphs.items():
        check_equal({name: with_graphs[f"{name.removesuffix(' alone')} alone"]}, {name: answer})


@pytest.mark.gpus(2)
@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_layouts_have_the_same_noise(run_ranks: RunRanks, expected: Answers, split: str) -> None:
    ((found,), _) = run_ranks(2, generate, f"--{split}-model-parallel-size 2", "rotary-grouped", [True])
    check_equal(found, expected)


def zeros() -> None:
    """Check that coefficient 0 changes no bit of logits that graphs compute."""
    with groups_of("") as (layout, device):
        config = config_of(VARIANTS["rotary-grouped"])
        gang, engine = open_engine(model_of(config, layout, device), config, layout, device, fuse=False)
        assert engine is not None
        assert gang.runner.uses_graphs
        clean = logits_of(run(engine, request("clean")), "clean")
        for kind in ("gaussian", "uniform"):
            none = {"type": kind, "coefficient": 0.0}
            zero = recipe(
                *(calculation(site, none) for site in (*SITES, "logits")),
                {"kind": "system", "action": none},
                *(storage(module, none) for module in ("mlp.linear_fc1", "embedding.word_embeddings")),
            )
            assert torch.equal(logits_of(run(engine, request("zero", zero)), "zero"), clean)
        strong = recipe(storage("mlp.linear_fc1", {"type": "bitFlip", "bits": "exponent", "rate": 0.2}))
        assert bool(logits_of(run(engine, request("strong", strong)), "strong").isnan().any())
        assert torch.equal(logits_of(run(engine, request("clean")), "clean"), clean)
        engine.close()


def test_coefficient_0_changes_no_bit(run_ranks: RunRanks) -> None:
    run_ranks(1, zeros)
