"""Perturbed generation: null tests, plain torch's ablations, noise equal on every layout, and turns of recipes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from generating_ranks import LAYOUTS, VARIANTS, config_of, generated, groups_of, model_of, open_engine, plain_of
from perturbing_ranks import (
    GAUSSIAN,
    NEW,
    PROMPTS,
    Values,
    calculation,
    logits_of,
    noise_alone,
    read,
    recipe,
    request,
    run,
    samples,
    storage,
)
from plain_gpt import PlainGpt

from megatronapp_common.scope.protocol_requests import PerturbedTexts
from megatronapp_trainer.device.cuda_graphs import GraphCache
from megatronapp_trainer.hooks.perturbation import limits
from megatronapp_trainer.hooks.perturbation.limits import needed_bytes
from megatronapp_trainer.hooks.perturbation.model_shard import model_shard_of
from megatronapp_trainer.hooks.perturbation.noise import DRAWING_BYTES
from megatronapp_trainer.hooks.perturbation.storage import PerturbedParameters
from megatronapp_trainer.inference.engine import Engine
from megatronapp_trainer.inference.errors import QueueFullError, RequestError
from megatronapp_trainer.inference.perturbed_steps import MOST_UNUSED, PerturbedGraphs
from megatronapp_trainer.inference.worker_group import WorkerGroup
from megatronapp_trainer.scope.coordinator import perturbed_fields

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]
SITES = ("embedding", "q", "k", "head_output", "attention_output", "mlp_in", "mlp1", "mlp2", "residual", "final_norm")
ZERO = {"type": "zero"}
LAST = {"origin": "promptEnd", "first": -1}
LENGTH = len(PROMPTS[0])


def alone(checks: tuple[str, ...], chunk: int) -> None:
    """Run some of the checks below against an engine of one process, which must be as before each time."""
    with groups_of("") as (layout, device):
        config = config_of(VARIANTS["rotary-grouped"])
        model = model_of(config, layout, device)
        plain = plain_of(model, config)
        gang, engine = open_engine(model, config, layout, device, prefill_chunk=chunk)
        assert engine is not None
        for check in checks:
            globals()[check](gang, engine, plain)


def nulls(gang: WorkerGroup, engine: Engine, _plain: PlainGpt) -> None:
    """Check that coefficient 0 and undone perturbations change no bit of logits and parameters."""
    before = {name: parameter.clone() for name, parameter in gang.runner.model.named_parameters()}
    clean = logits_of(run(engine, request("clean")), "clean")
    for kind in ("gaussian", "uniform"):
        none = {"type": kind, "coefficient": 0.0}
        zero = recipe(
            *(calculation(site, none) for site in (*SITES, "logits")),
            {"kind": "system", "action": none},
            *(storage(module, none) for module in ("mlp.linear_fc1", "embedding.word_embeddings")),
        )
        assert torch.equal(logits_of(run(engine, request("zero", zero)), "zero"), clean)
    broken = storage("mlp.linear_fc1", {"type": "bitFlip", "bits": "exponent", "rate": 0.2})
    strong = recipe(broken, calculation("q", GAUSSIAN), {"kind": "system", "action": GAUSSIAN})
    assert bool(logits_of(run(engine, request("strong", strong)), "strong").isnan().any())
    assert torch.equal(logits_of(run(engine, request("clean")), "clean"), clean)
    after = dict(gang.runner.model.named_parameters())
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(not module._forward_hooks for module in gang.runner.model.modules())


def ablations(_gang: WorkerGroup, engine: Engine, plain: PlainGpt) -> None:
    """Check ablations against plain torch with the weights that write into the residual set to zero."""
    width, layer = plain._shape.channels, "decoder.layers.1."
    for site, module, columns, heads in (
        ("mlp2", "mlp.linear_fc2", slice(None), {}),
        ("head_output", "self_attention.linear_proj", slice(2 * width, 3 * width), {"heads": [2]}),
    ):
        weights = {name: value.clone() for name, value in plain._weights.items()}
        weights[f"{layer}{module}.weight"][:, columns] = 0
        edited = PlainGpt(weights, plain._shape)
        for zero in (calculation(site, ZERO, layers=[1], **heads), storage(module, ZERO, layers=[1], **heads)):
            events = run(engine, request("zero", recipe(zero)))
            expected = edited.logits([*PROMPTS[0], *generated(events, "zero")])[:-1]
            assert torch.allclose(logits_of(events, "zero"), expected, atol=1e-4, rtol=1e-4)


def means(gang: WorkerGroup, engine: Engine, _plain: PlainGpt) -> None:
    """Check means: given ones, and those of the prompt, which sizes of chunks change by rounding alone."""
    clean = read(gang, engine, ("mlp2",), samples(None))
    prompt = torch.stack([clean["mlp2", 0, 0, position] for position in range(LENGTH)]).double().mean(0).float()
    over = calculation("mlp2", {"type": "mean", "over": "prompt"}, layers=[0])
    given = calculation("mlp2", {"type": "mean", "values": prompt.tolist()}, layers=[0], steps={"first": 1})
    for perturbation, first in ((over, LENGTH - 1), (given, LENGTH)):
        found = read(gang, engine, ("mlp2",), samples(recipe(perturbation)))
        for position in range(LENGTH + NEW - 1):
            expected = prompt if position >= first else clean["mlp2", 0, 0, position]
            assert torch.allclose(found["mlp2", 0, 0, position], expected, atol=1e-6, rtol=1e-6)


def selections(gang: WorkerGroup, engine: Engine, _plain: PlainGpt) -> None:
    """Check which positions, layers and heads change; values that no changed one leads to keep every bit."""
    clean = read(gang, engine, ("head_output",), samples(None))
    ranges = [{"first": 2, "end": 4}, {"origin": "promptEnd", "first": -1}]
    noise = calculation("head_output", GAUSSIAN, layers=[1], heads=[0, 3], positions=ranges)
    found = read(gang, engine, ("head_output",), samples(recipe(noise)))
    for (site, layer, sample, position), value in found.items():
        if layer > 1 or position >= LENGTH:
            continue  # they depend on changed values
        same = [torch.equal(*pair) for pair in zip(value, clean[site, layer, sample, position], strict=True)]
        changes = layer == 1 and position in {2, 3, LENGTH - 1}
        assert same == [not changes, True, True, not changes]


def uniform_patterns(gang: WorkerGroup, engine: Engine, _plain: PlainGpt) -> None:
    """Check that a head whose query is zero gives equal weight to all tokens that it sees."""
    zero = recipe(calculation("q", ZERO, layers=[1], heads=[1]))
    found = read(gang, engine, ("v", "head_output"), samples(zero))
    for position in range(LENGTH + NEW - 1):
        values = torch.stack([found["v", 1, 0, before][0] for before in range(position + 1)])
        assert torch.allclose(found["head_output", 1, 0, position][1], values.mean(0), atol=1e-5)


def interleaved(_gang: WorkerGroup, engine: Engine, _plain: PlainGpt) -> None:
    """Check requests of three recipes and none that generate together: each as if it were alone."""
    recipes = [
        None,
        recipe(calculation("mlp2", GAUSSIAN)),
        recipe(storage("mlp.linear_fc1", {"type": "gaussian", "coefficient": 0.1}), seed=1),
        recipe({"kind": "system", "action": {"type": "uniform", "coefficient": 0.4}}, seed=2),
    ]
    requests = [
        request(str(place), perturbation, prompt=PROMPTS[place % 2], temperature=1.0, seed=place, sample=place // 4)
        for place, perturbation in enumerate([*recipes, *recipes])
    ]
    apart = {mine.id: logits_of(run(engine, mine), mine.id) for mine in requests}
    events = run(engine, *requests)
    for mine in requests:
        assert torch.allclose(logits_of(events, mine.id), apart[mine.id], atol=1e-4, rtol=1e-4)
    assert len({tuple(generated(events, mine.id)) for mine in requests}) == len(requests)
    assert engine._recipes.is_empty


def joined(gang: WorkerGroup, engine: Engine, _plain: PlainGpt) -> None:
    """Check that a recipe that is added while another one is in use is drawn from the model's own weights."""
    before = {name: parameter.clone() for name, parameter in gang.runner.model.named_parameters()}
    noises = [recipe(storage("mlp.linear_fc1", {"type": "gaussian", "coefficient": 0.1}), seed=seed) for seed in (1, 2)]
    first, second = (request(str(place), noise) for place, noise in enumerate(noises))
    alone = logits_of(run(engine, second), second.id)
    engine.submit(first)
    engine.step()
    assert gang.runner.perturbation._perturbations.active == noises[0].digest
    assert torch.allclose(logits_of(run(engine, second), second.id), alone, atol=1e-4, rtol=1e-4)
    after = dict(gang.runner.model.named_parameters())
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def rereads(gang: WorkerGroup, engine: Engine, _plain: PlainGpt) -> None:
    """Check that a probe reads the text of a perturbed run, generated tokens included, as the run did."""
    places = {"positions": [{"origin": "promptEnd", "first": -2}], "steps": {"first": 1, "end": 4}}
    noise = recipe(calculation("mlp2", GAUSSIAN, **places), {"kind": "system", "action": GAUSSIAN})
    (mine,) = samples(noise)
    mine = dataclasses.replace(mine, sample=3)
    tokens = generated(run(engine, mine), mine.id)
    seen = read(gang, engine, ("residual",), [mine])
    texts = PerturbedTexts(recipe=noise, samples=(3,), prompt_lengths=(LENGTH,))
    text = (*PROMPTS[0], *tokens[:-1])
    again = request(mine.id, prompt=text, max_new_tokens=0, prompt_logprobs=True, **perturbed_fields(texts, 0))
    found = read(gang, engine, ("residual",), [again])
    assert set(seen) == set(found)
    assert all(torch.allclose(value, found[key], atol=1e-4, rtol=1e-4) for key, value in seen.items())


def graphs_of_recipes(gang: WorkerGroup, engine: Engine, _plain: PlainGpt) -> None:
    """Check that graphs are captured for each recipe apart, and stay for the next request with it while fewer than
    MOST_UNUSED others followed; those of parameters are dropped with the recipe. With a fake of CUDA graphs."""
    families: list[set[Any]] = []

    def capture(compute: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any, Any]:
        families.append(set(gang.runner._graphs._families))
        return (lambda: None), compute(), pool

    gang.runner._graphs = GraphCache(enabled=True, capture=capture)
    gang.runner.perturbation._drop_graphs = gang.runner._graphs.drop
    noise = recipe(calculation("mlp2", GAUSSIAN))
    run(engine, request("clean"), request("noise", noise))
    family = PerturbedGraphs(digest=noise.digest, captured=None)
    assert {family} in families and set(gang.runner._graphs._families) == {family}
    run(engine, request("alone", noise))
    captured = len(families)
    run(engine, request("again", noise))
    assert len(families) == captured, "an equal shape is replayed"
    others = [recipe(calculation("mlp2", GAUSSIAN), seed=seed) for seed in range(1, MOST_UNUSED + 1)]
    families_left = {PerturbedGraphs(digest=other.digest, captured=None) for other in others}
    for place, other in enumerate(others):
        run(engine, request(str(place), other))
    assert set(gang.runner._graphs._families) == families_left
    run(engine, request("stored", recipe(storage("mlp.linear_fc1", GAUSSIAN))))
    assert set(gang.runner._graphs._families) == families_left
    assert gang.runner.perturbation._perturbations.num_bytes == 0


def refusals(_gang: WorkerGroup, engine: Engine, _plain: PlainGpt) -> None:
    """Check that what the model lacks is refused with its place."""
    mean = {"type": "mean", "values": [1.0]}
    for perturbation, message in (
        (calculation("v", ZERO), "perturbations.0.site: v can only be read; write one of embedding, q"),
        (calculation("nothing", ZERO), "perturbations.0.site: nothing is not a site of this model"),
        (calculation("mlp2", ZERO, layers=[4]), "perturbations.0.layers.0: there is no layer 4; write 0 to 3"),
        (calculation("k", ZERO, heads=[0, 2]), "perturbations.0.heads.1: k has no head 2; write 0 to 1"),
        (calculation("mlp2", ZERO, heads=[0]), "perturbations.0.heads: mlp2 has no heads; leave heads out"),
        (calculation("final_norm", ZERO, layers=[0]), "perturbations.0.layers: final_norm belongs to no layer"),
        (calculation("q", mean), "perturbations.0.action.values: has 1 numbers, and q has 16 features"),
        (calculation("logits", {"type": "mean", "over": "prompt"}), "perturbations.0.action.over: logits are not"),
        (storage("mlp.fc1", ZERO), "perturbations.0.parameter: this model has no mlp.fc1.weight; modules with"),
        (storage("mlp.linear_fc1", ZERO, tensor="bias"), "this model has no mlp.linear_fc1.bias"),
        (storage("mlp.linear_fc1", ZERO, part="key"), "has no part key; write one of gate, up"),
        (storage("self_attention.linear_qkv", ZERO, heads=[0]), "part: must be given with heads"),
        (storage("embedding.position_embeddings", ZERO), "this model has no learned positions"),
    ):
        with pytest.raises(RequestError) as caught:
            engine.submit(request("bad", recipe(perturbation)))
        assert message in str(caught.value)


def patches(gang: WorkerGroup, engine: Engine, _plain: PlainGpt) -> None:
    """Check patches of more requests than slots: each as if it were alone, and nothing is left; and what is refused."""
    source = {"tokens": list(PROMPTS[1])}
    last = recipe(calculation("residual", {"type": "patch", "source": source}, layers=[1], positions=[LAST]))
    requests = [request(str(place), last, prompt=PROMPTS[0][place:]) for place in range(5)]
    apart = [logits_of(run(engine, mine), mine.id) for mine in requests]
    background = request("5", last, prompt=PROMPTS[0][:5], is_background=True)
    events = run(engine, background, request("clean"), *requests)
    clean = logits_of(run(engine, request("clean")), "clean")
    assert torch.allclose(logits_of(events, "clean"), clean, atol=1e-4, rtol=1e-4)
    for mine, expected in zip(requests, apart, strict=True):
        found = logits_of(events, mine.id)
        assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(apart[0][LENGTH - 1], clean[LENGTH - 1], atol=0.1)
    assert torch.allclose(apart[0][: LENGTH - 1], clean[: LENGTH - 1], atol=1e-4)
    assert engine._recipes.is_empty
    assert all(not module._forward_hooks for module in gang.runner.model.modules())
    size = 2 * gang.runner.model.config.hidden_size * 4
    two = calculation("residual", {"type": "patch", "source": source}, layers=[1], positions=[LAST | {"first": -2}])
    assert gang.runner.perturbation.check(recipe(two)) == size
    for places, action, message in (
        ([{}], source, "positions.0: token 7 of the prompt (12 tokens) has no counterpart in the source (7 tokens)"),
        ([{"first": 12}], source, "positions.0: selects no token of a prompt of 12 tokens"),
        ([LAST], {"prompt": "a"}, "action.source.prompt: this model has no tokenizer; write tokens"),
        ([LAST], {"tokens": [200]}, "action.source.tokens.0: there is no token 200; write 0 to 119"),
    ):
        wrong = calculation("mlp2", {"type": "patch", "source": action}, positions=places)
        with pytest.raises(RequestError) as caught:
            engine.submit(request("bad", recipe(wrong)))
        assert f"perturbations.0.{message}" in str(caught.value)


def bounds(gang: WorkerGroup, engine: Engine, _plain: PlainGpt) -> None:
    """Check that recipes that draw too much, or whose memory is reserved by others, are refused."""
    noise = recipe(*(calculation("mlp1", GAUSSIAN) for _ in range(3)))
    stored = recipe(storage("mlp.linear_fc1", GAUSSIAN), storage("mlp.linear_fc1", GAUSSIAN))
    inner = 2 * gang.runner.model.config.ffn_hidden_size
    needed = 3 * 4 * inner * 16
    for limit, refused, message in (
        ("MAX_STEP_NUMBERS", noise, f"a step of 16 tokens would draw {needed} random numbers on a rank, and at most"),
        ("MAX_PARAMETER_NUMBERS", stored, "choose fewer layers, modules or perturbations"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(limits, limit, needed - 1)
            with pytest.raises(RequestError, match=message):
                engine.submit(request("bad", refused))
    means = recipe(calculation("mlp2", {"type": "mean", "over": "prompt"}))
    size = gang.runner.perturbation.check(means)
    hidden, slots = gang.runner.model.config.hidden_size, gang.runner.options.slots
    assert size == 4 * slots * hidden * 12 + 16 * hidden * 8
    with pytest.MonkeyPatch.context() as patch:
        free = DRAWING_BYTES + size
        patch.setattr(type(gang.runner.perturbation), "capacity_bytes", property(lambda _: free))
        engine.submit(request("first", recipe(calculation("q", GAUSSIAN))))
        engine.submit(request("second", means))
        with pytest.raises(QueueFullError, match="try again once they have ended"):
            engine.submit(request("third", recipe(calculation("k", GAUSSIAN))))
        with pytest.raises(RequestError, match="choose fewer layers or modules"):
            engine.submit(request("fourth", recipe(storage("mlp.linear_fc2", GAUSSIAN))))
    run(engine, request("third", recipe(calculation("k", GAUSSIAN))))


CHECKS = (
    "bounds",
    "nulls",
    "ablations",
    "means",
    "selections",
    "uniform_patterns",
    "interleaved",
    "joined",
    "rereads",
    "patches",
    "graphs_of_recipes",
    "refusals",
)


def test_a_single_process(run_ranks: RunRanks) -> None:
    run_ranks(1, alone, CHECKS, 16)


def test_means_of_prompts_in_chunks(run_ranks: RunRanks) -> None:
    run_ranks(1, alone, ("means",), 5)


STORED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("self_attention.linear_qkv", {}),
    ("self_attention.linear_qkv", {"part": "key", "heads": [1]}),
    ("self_attention.linear_proj", {"heads": [0, 3]}),
    ("mlp.linear_fc1", {}),
    ("mlp.linear_fc2", {}),
    ("embedding.word_embeddings", {}),
)


def draw(flags: str, variant: str, chunk: int = 16) -> tuple[int, Values, dict[str, torch.Tensor], tuple[int, int]]:
    """Tensor rank, noise of sites, and perturbed parameters of a rank; their bytes, and those of its estimate."""
    with groups_of(flags) as (layout, device):
        config = config_of(f"{flags} {VARIANTS[variant]}")
        gang, engine = open_engine(model_of(config, layout, device), config, layout, device, prefill_chunk=chunk)
        noise = recipe(*(entry for site in SITES for entry in noise_alone(site)), seed=4)
        values = read(gang, engine, SITES, samples(noise, PROMPTS))
        stored = recipe(*(storage(module, GAUSSIAN, **fields) for module, fields in STORED), seed=4)
        shard = model_shard_of(gang.runner.model, layout, vocabulary=gang.runner.vocab_size)
        parameters = PerturbedParameters(stored, [gang.runner.model], shard)
        estimate = 0
        if layout.rank == 0:
            estimate = needed_bytes(stored, gang.runner.model, shard, slots=2, tokens=chunk) - DRAWING_BYTES
        parameters.swap_in()
        return layout.tensor_rank, values, global_names(gang.runner.model), (parameters.num_bytes, estimate)


def global_names(model: Any) -> dict[str, torch.Tensor]:
    """Parameters of a rank by their names in the whole model."""
    found = dict(model.named_parameters(prefix="", recurse=True))
    named = {name: value.detach() for name, value in found.items() if not name.startswith("decoder.layers.")}
    for layer in model.decoder.layers:
        prefix = f"decoder.layers.{layer.layer_number - 1}."
        named |= {prefix + name: value.detach() for name, value in layer.named_parameters()}
    return named


def shard_of(name: str, whole: torch.Tensor, like: torch.Tensor, rank: int, *, gated: bool) -> torch.Tensor:
    """Apply the written rule: two equal parts along an axis; of [gate; up] a part of each."""
    if whole.shape == like.shape:
        return whole
    axis = 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0
    if gated and ("linear_fc1" in name or name == "mlp1"):
        return torch.cat([half.chunk(2)[rank] for half in whole.chunk(2)])
    return whole.chunk(2, axis)[rank]


def check_layout(alone: Any, ranks: list[Any], *, gated: bool) -> None:
    """Compare the noise of all ranks with that of one process, bit for bit."""
    _, values, parameters, _ = alone
    parameters |= {"output_layer.weight": parameters.get("output_layer.weight", parameters[EMBEDDING])}
    for rank, found, perturbed, _ in ranks:
        for key, value in found.items():
            assert torch.equal(value, shard_of(key[0], values[key], value, rank, gated=gated)), key
        for name, value in perturbed.items():
            assert torch.equal(value, shard_of(name, parameters[name], value, rank, gated=gated)), name
    assert {key for _, found, *_ in ranks for key in found} == set(values)
    assert ranks[0][3][1] == max(size for *_, (size, _) in ranks), "rank 0 estimates the stage with the most"


EMBEDDING = "embedding.word_embeddings.weight"


@pytest.mark.full("each split of tensors and layers, with every kind of model", but=("TP2xPP2-rotary-grouped",))
@pytest.mark.parametrize("variant", ["rotary-grouped", "learned-tied"])
@pytest.mark.parametrize("layout", ["TP2xPP2", "TP2", "PP2"])
def test_noise_is_equal_on_every_layout(run_ranks: RunRanks, layout: str, variant: str) -> None:
    """Check it also streamed in chunks, against one process that reads prompts at once."""
    world, flags = LAYOUTS[layout]
    (whole,) = run_ranks(1, draw, "", variant)
    check_layout(whole, run_ranks(world, draw, flags, variant, 5), gated=variant != "learned-tied")


def at_once() -> None:
    """Check that a text that is read as one prompt has the noise of the same tokens when they were generated."""
    with groups_of("") as (layout, device):
        config = config_of(VARIANTS["rotary-grouped"])
        gang, engine = open_engine(model_of(config, layout, device), config, layout, device, prefill_chunk=64)
        noise = recipe(*noise_alone("q"), *noise_alone("mlp1"))
        streamed = read(gang, engine, ("q", "mlp1"), samples(noise, PROMPTS))
        longer = [prompt + (1,) * NEW for prompt in PROMPTS]
        whole = read(gang, engine, ("q", "mlp1"), samples(noise, longer, 1))
        assert all(torch.equal(value, whole[key]) for key, value in streamed.items())
        places = [("q", 0, 0, 3), ("q", 0, 1, 3), ("q", 1, 0, 3), ("q", 0, 0, 4)]
        assert len({tuple(whole[place].flatten().tolist()) for place in places}) == len(places)


def test_noise_is_equal_streamed_and_at_once(run_ranks: RunRanks) -> None:
    run_ranks(1, at_once)
