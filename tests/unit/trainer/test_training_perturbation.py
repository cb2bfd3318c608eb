"""Perturbation of a model that trains: null tests, noise equal on every layout, undo, and refusals."""

import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from perturbed_training import SMALL, added_and_estimated, perturb, train
from perturbing_ranks import GAUSSIAN, calculation, noise_alone, storage

from megatronapp_common.frames import FrameType, decode

pytestmark = pytest.mark.torch
RunRanks = Callable[..., list[Any]]
NONE = {"type": "gaussian", "coefficient": 0.0}
UNIT = {"type": "uniform", "coefficient": 0.0}
FC1, EMBEDDING = "mlp.linear_fc1", "embedding.word_embeddings"
SITES = ("embedding", "head_output", "attention_output", "mlp_in", "mlp1", "mlp2", "residual", "final_norm", "logits")
PRECISIONS = {"fp32": "--attention-dropout 0.1", "bf16": "--bf16 --use-distributed-optimizer"}
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LAYOUTS = {
    "DP2": (2, ""),
    "TP2-SP": (2, f"--tensor-model-parallel-size 2 --sequence-parallel {RECOMPUTE}"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "PP2-VPP2": (
        2,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --recompute-granularity selective",
    ),
}


def ranks_of(run_ranks: RunRanks, world: int, *arguments: Any) -> list[dict[str, Any]]:
    environment = {"MEGATRONAPP_JOB_UID": f"perturb-{os.getpid()}-{world}"}
    return run_ranks(world, train, *arguments, environment=environment)


def reported(ranks: list[dict[str, Any]], name: str) -> Any:
    (found,) = [rank[name] for rank in ranks if rank["losses"]]
    return found


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


@pytest.mark.full("both precisions", but=("fp32",))
@pytest.mark.parametrize("flags", PRECISIONS.values(), ids=list(PRECISIONS))
def test_coefficient_0_changes_no_bit(run_ranks: RunRanks, flags: str) -> None:
    stored = (storage(FC1, NONE), storage(EMBEDDING, UNIT))
    places = (*(calculation(site, NONE) for site in SITES[:3]), {"kind": "system", "action": NONE})
    activations = () if "bf16" in flags else places  # their biases are rounded before the sum otherwise
    script = [
        (0, perturb(1, *stored, target="master")),
        (1, perturb(2, *stored, *activations)),
        (2, {"number": 3, "kind": "undo"}),
    ]
    perturbed, clean = (ranks_of(run_ranks, 2, flags, orders) for orders in (script, []))
    assert [rank["obeyed"][1] for rank in perturbed] == [(0, None)] * 2
    assert [rank["obeyed"][2][1] for rank in perturbed] == [None] * 2
    assert reported(perturbed, "losses") == reported(clean, "losses")
    assert reported(perturbed, "norms") == reported(clean, "norms")
    for mine, plain in zip(perturbed, clean, strict=True):
        assert all(equal(*pair) for pair in zip(mine["weights"], plain["weights"], strict=True))
        assert all(torch.equal(*pair) for pair in zip(mine["optimizer"], plain["optimizer"], strict=True))


NOISE = (*noise_alone("mlp2"), *noise_alone("head_output"))


def passes(rank: dict[str, Any], layer: int, *, step: int, each: int) -> list[torch.Tensor]:
    """Values of the passes of a step, `each` in a step; evaluations follow after the last one."""
    values: list[torch.Tensor] = rank["values"][layer]
    return values[step * each : (step + 1) * each]


@pytest.mark.full("each layout", but=("TP2-SP",))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_noise_is_equal_on_every_layout(run_ranks: RunRanks, layout: str) -> None:
    """Compare with one process: values of a site that is replaced by noise, and perturbed master weights."""
    world, flags = LAYOUTS[layout]
    site = {"PP2": "residual", "PP2-VPP2": "mlp2"}.get(layout, "head_output")
    noise = noise_alone(site) if layout == "PP2" else NOISE  # an output of a stage is freed once it is sent
    stored = [storage(name, GAUSSIAN) for name in (FC1, "mlp.linear_fc2", EMBEDDING)]
    script = [(0, perturb(1, *stored, seed=4, target="master")), (1, perturb(2, *noise, seed=4))]
    (whole,) = ranks_of(run_ranks, 1, "", script, site)
    ranks = ranks_of(run_ranks, world, flags, script, site)
    for rank in (whole, *ranks):
        assert (rank["obeyed"][1], rank["obeyed"][2]) == ((0, None), (2, None))
    for rank in ranks:
        tensor, data = rank["place"]
        for layer in rank["values"]:
            expected = passes(whole, layer, step=2, each=4)
            if layout == "DP2":
                expected = expected[data::2]
            each = {"DP2": 2, "TP2-SP": 8}.get(layout, 4)  # recomputed passes are recorded again
            check_passes(passes(rank, layer, step=2, each=each), expected, tensor if layout == "TP2-SP" else None)
        for name, weight in rank["weights"][0].items():
            source = EMBEDDING + ".weight" if name == "output_layer.weight" else name
            assert torch.equal(weight, shard_of(name, whole["weights"][0][source], weight, tensor)), name


def check_passes(found: list[torch.Tensor], expected: list[torch.Tensor], tensor: int | None) -> None:
    """Each pass has the noise of a microbatch, and each microbatch its pass; a repeated pass the same one."""
    if tensor is not None:
        expected = [value.chunk(2, dim=2)[tensor] for value in expected]
    for value in found:
        assert any(torch.equal(value, other) for other in expected)
    for other in expected:
        assert any(torch.equal(value, other) for value in found)


def shard_of(name: str, whole: torch.Tensor, like: torch.Tensor, rank: int) -> torch.Tensor:
    if whole.shape == like.shape:
        return whole
    return whole.chunk(2, 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0)[rank]


def test_parameters_are_perturbed_for_a_step_or_for_good_and_undone(
    run_ranks: RunRanks, tmp_path: pathlib.Path
) -> None:
    noise = storage(EMBEDDING, {"type": "gaussian", "coefficient": 0.3})
    flags = "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    undone = [(0, perturb(1, noise, target="master")), (0, {"number": 2, "kind": "undo"}), (1, perturb(3, noise))]
    ranks = ranks_of(run_ranks, 2, f"{flags} {with_captures(tmp_path)}", undone)
    clean = ranks_of(run_ranks, 2, f"{flags} --vocab-size 280", [])
    for rank, plain in zip(ranks, clean, strict=True):
        assert [rank["obeyed"][number] for number in (1, 2)] == [(0, None)] * 2
        assert rank["obeyed"][3] == (2, None)
        assert equal(rank["weights"][0], plain["weights"][0])
        ((digest, *steps),) = rank["perturbed"]
        assert steps == [3, 3]
        marked = {1: None, 2: None, 3: digest, 4: None}
        frames = [decode(data) for data in rank["frames"]]
        kinds = {FrameType.TRAINING_STATISTICS, FrameType.TRAINING_PROBE} if rank["place"][1] == 0 else {frames[0].type}
        assert {frame.type for frame in frames} == kinds
        assert {(frame.header["step"], frame.header.get("perturbation")) for frame in frames} == set(marked.items())
    losses, undisturbed = reported(ranks, "losses"), reported(clean, "losses")
    assert losses[:2] == undisturbed[:2]
    assert abs(losses[2] - undisturbed[2]) > 0.01
    assert abs(losses[3] - undisturbed[3]) < abs(losses[2] - undisturbed[2]) / 2, "the optimizer updates other weights"
    report = reported(ranks, "reports")[-1]
    assert report["perturbation"] is None
    assert report["perturbed"] == [
        {"digest": digest, "parameters": "model", "replica": None, "firstStep": 3, "lastStep": 3}
    ]


def with_captures(folder: pathlib.Path) -> str:
    """Flags that capture each step and run a probe text after it."""
    from megatronapp_trainer.data import tokenizer

    path = folder / "tokenizer.json"
    tokenizer.train(["the sea"], 260).backend.save(str(path))
    return f'--scope-capture-interval 1 --tokenizer-file {path} --vocab-size 280 --scope-probe-texts ["sea"]'


FBD = "--forward-backward-disaggregating"


@pytest.mark.full("the same on separate forward ranks", but=("plain",))
@pytest.mark.parametrize(("world", "flags"), [(1, ""), (2, FBD)], ids=["plain", "pair"])
def test_a_perturbed_step_is_computed_again_with_equal_numbers(run_ranks: RunRanks, world: int, flags: str) -> None:
    """Parameters that overflow: the capture of the second computation is that of the first one."""
    places = [storage(FC1, {"type": "bitFlip", "rate": 0.5, "bits": "exponent"})]
    if world == 1:
        places.append(calculation("head_output", GAUSSIAN))
    script = [(0, perturb(1, *places))]
    common = f"{flags} --attention-dropout 0.1 --scope-capture-interval"
    ranks, captured = (ranks_of(run_ranks, world, f"{common} {every}", script) for every in (9, 1))
    assert ranks[0]["code"] == captured[0]["code"] == 66
    ((digest, *_),) = ranks[0]["perturbed"]
    for again, rank in zip(ranks, captured, strict=True):
        repeated, first = decode(again["frames"][-1]), decode(rank["frames"][-1])
        assert first.header["perturbation"] == digest
        assert repeated.header == {**first.header, "repeated": True}
        assert repeated.body == first.body
    assert equal(ranks[0]["weights"][0], ranks[0]["weights"][-1])


FBD_LAYOUTS = {
    "pair": (2, FBD, 1, ""),
    "shared": (3, f"{FBD} --fbd-backward-per-forward 2", 2, ""),
    "full-PP2": (
        4,
        f"{FBD} --fbd-ship full --pipeline-model-parallel-size 2",
        2,
        f"--pipeline-model-parallel-size 2 {RECOMPUTE}",
    ),
}


@pytest.mark.full("the same commands with other graphs and partners", but=("pair",))
@pytest.mark.parametrize("layout", FBD_LAYOUTS)
def test_parameters_on_separate_forward_ranks_are_perturbed_as_without_them(run_ranks: RunRanks, layout: str) -> None:
    """Evaluations bring forward ranks the weights before a step that perturbs them."""
    world, flags, plain_world, plain_flags = FBD_LAYOUTS[layout]
    noise = storage(FC1, GAUSSIAN), storage(EMBEDDING, {"type": "uniform", "coefficient": 0.5})
    script = [
        (0, perturb(1, *noise, target="master")),
        (0, {"number": 2, "kind": "undo"}),
        (0, perturb(3, *noise, target="master", seed=2)),
        (1, perturb(4, *noise)),
        (2, {"number": 5, "kind": "undo"}),
    ]
    common = "--attention-dropout 0.1 --eval-interval 1 --eval-iters 1 --scope-capture-interval 1"
    ranks = ranks_of(run_ranks, world, f"{flags} {common}", script)
    plain = ranks_of(run_ranks, plain_world, f"{plain_flags} {common}", script)
    assert reported(ranks, "losses") == reported(plain, "losses")
    assert reported(ranks, "norms") == reported(plain, "norms")
    digests = reported(plain, "perturbed")
    marked = {1: digests[0][0], 2: None, 3: digests[1][0], 4: None}
    for rank in ranks:
        assert [rank["obeyed"][number] for number in (1, 2, 3, 4)] == [(0, None)] * 3 + [(2, None)]
        assert rank["obeyed"][5][0] == 3 and rank["obeyed"][5][1] is not None
        frames = [decode(data) for data in rank["frames"]]
        assert {(frame.header["step"], frame.header.get("perturbation")) for frame in frames} == set(marked.items())


@pytest.mark.full("the same hooks on one of two replicas")
def test_a_replica_is_perturbed_for_some_steps(run_ranks: RunRanks) -> None:
    order = perturb(1, calculation("mlp2", GAUSSIAN, layers=[1]), replica=1, steps=2)
    script = [(0, order), (3, perturb(2, storage(FC1, NONE), target="master")), (3, {"number": 3, "kind": "undo"})]
    ranks, clean = (ranks_of(run_ranks, 2, "", orders, "mlp2") for orders in (script, []))
    for data, (rank, plain) in enumerate(zip(ranks, clean, strict=True)):
        first = [torch.equal(*pair) for pair in zip(rank["values"][1][:2], plain["values"][1][:2], strict=True)]
        assert first == [data == 0] * 2
        assert rank["perturbed"][0][1:] == (1, 2)
        assert equal(rank["weights"][-1], ranks[0]["weights"][-1]), "replicas are alike"


@pytest.mark.full("the same swap on one of two replicas, of which both gather parameters")
def test_parameters_of_a_replica_are_perturbed_while_gathers_overlap(run_ranks: RunRanks) -> None:
    flags = "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    script = [(0, perturb(1, storage(FC1, GAUSSIAN), replica=1))]
    ranks, clean = (ranks_of(run_ranks, 2, flags, orders) for orders in (script, []))
    for rank in ranks:
        assert rank["obeyed"][1] == (0, None)
        assert rank["perturbed"][0][1:] == (1, 1)
        assert equal(rank["weights"][-1], ranks[0]["weights"][-1])
    assert not equal(ranks[0]["weights"][-1], clean[0]["weights"][-1])


def test_a_stop_undoes_what_no_step_has_used(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    script = [(0, perturb(1, storage(FC1, GAUSSIAN), target="master")), (0, {"number": 2, "kind": "stop"})]
    (rank,) = ranks_of(run_ranks, 1, f"--save {tmp_path}", script)
    assert [rank["obeyed"][number] for number in (1, 2)] == [(0, None)] * 2
    assert rank["perturbed"] == []
    assert [report["perturbation"] for report in rank["reports"]][-1] is None


def test_memory_is_estimated_before_anything_is_drawn(run_ranks: RunRanks) -> None:
    noise = {"type": "uniform", "coefficient": 0.1}
    sites = [calculation(site, noise) for site in ("mlp1", "mlp2", "attention_output", "logits")]
    heads = calculation("head_output", noise, heads=[1])
    (found,) = run_ranks(1, added_and_estimated, "--hidden-dropout 0 --attention-dropout 0", [*sites, heads])
    added, estimate = found
    assert added <= estimate <= 2 * added
    script = [
        (0, perturb(1, calculation("mlp2", noise), replica=1)),
        (0, perturb(2, storage(FC1, NONE), target="master")),
        (0, perturb(3, calculation("mlp2", {"type": "zero"}), replica=0)),
    ]
    for rank in ranks_of(run_ranks, 2, "", script, None, SMALL, 100 << 20):
        refusal = rank["obeyed"][1][1]
        assert refusal.startswith("a rank has 100MiB of free memory, and the perturbation takes about 128MiB there")
        assert rank["obeyed"][2][1] is not None and rank["obeyed"][3] == (0, None)


def test_a_replica_without_memory_refuses_for_all_while_gathers_overlap(run_ranks: RunRanks) -> None:
    """The replica that is perturbed lacks memory, and the other one needs none; both gather parameters."""
    zeros = storage(FC1, {"type": "zero"}), calculation("mlp2", {"type": "zero"})
    script = [(1, perturb(1, *zeros, replica=1))]  # after a step nothing is gathered
    flags = "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"
    plain = ranks_of(run_ranks, 2, flags, [])
    limited = ranks_of(run_ranks, 2, flags, script, None, SMALL, 1 << 10)
    for rank, other in zip(limited, plain, strict=True):
        assert rank["obeyed"][1][1].startswith("a rank has 1KiB of free memory")
        assert equal(rank["weights"][-1], other["weights"][-1])


@pytest.mark.full("other schedules", but=("plain",))
@pytest.mark.parametrize(
    ("world", "flags", "orders", "message"),
    [
        (
            1, "",
            [
                (0, perturb(1, storage("mlp.linear_fc9", NONE))),
                (0, perturb(2, calculation("mlp2", NONE), replica=1)),
                (0, perturb(3, calculation("mlp2", NONE, positions=[{"origin": "promptEnd", "first": 0}]))),
                (0, perturb(4, storage(FC1, NONE), steps=2)),
                (0, perturb(5, storage(FC1, NONE), calculation("mlp2", NONE), target="master")),
                (0, perturb(6, storage(FC1, NONE), target="master")),
                (1, {"number": 7, "kind": "undo"}),
            ],
            [
                "perturbations.0.parameter: this model has no mlp.linear_fc9.weight",
                "there is no replica 1; give 0 to 0",
                "perturbations.0.positions: samples of a training have no prompt",
                "steps means nothing for a recipe without activations",
                "master parameters are perturbed for good, and activations until undo",
                None,
                "step 1 has used the perturbed parameters, so that they cannot be undone",
            ],
        ),
        (
            2, "--use-dpp --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
            [(0, perturb(1, calculation("mlp2", NONE))), (0, perturb(2, storage(FC1, GAUSSIAN)))],
            ["with --use-dpp passes run in no fixed order", None],
        ),
        (
            3, "--forward-backward-disaggregating --fbd-backward-per-forward 2",
            [(0, perturb(1, calculation("mlp2", NONE))), (0, perturb(2, storage(FC1, NONE), replica=1))],
            [
                "with MegaFBD backward passes run by graphs that are built at the start",
                "a forward rank runs the passes of several replicas with the same weights",
            ],
        ),
    ],
    ids=["plain", "dynamic", "shared-forward-rank"],
)  # fmt: skip
def test_what_cannot_be_perturbed_is_refused_on_all_ranks(
    run_ranks: RunRanks, world: int, flags: str, orders: Any, message: list[str | None]
) -> None:
    for rank in ranks_of(run_ranks, world, flags, orders):
        for number, expected in enumerate(message, 1):
            refusal = rank["obeyed"][number][1]
            assert (refusal is None) if expected is None else refusal is not None and refusal.startswith(expected)
