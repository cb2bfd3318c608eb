"""Flags of MegaFBD and their rules; worlds and layouts of its ranks."""

import dataclasses
import json
from typing import Any

import pytest

from megatronapp_common.topology import FbdWorld, RankRole, Topology, fbd_world
from megatronapp_trainer.config import FbdConfig, TrainerConfig, parse
from megatronapp_trainer.config.checks import check_world
from megatronapp_trainer.config.rules.fbd import fbd_problems
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.parallel.layout import Layout, layout_from_environment
from megatronapp_trainer.scan.metadata import communicators, ring_metadata
from megatronapp_trainer.scan.run_context import RunContext

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --train-iters 10 "
    "--lr 1e-3 --mock-data --vocab-size 128 --attention-dropout 0"
)

ON_CPU_SHIPS_FULL = "--fbd-forward-on-cpu needs --fbd-ship full"


def config_of(more: str = "", **fbd: Any) -> TrainerConfig:
    options = {"forward_backward_disaggregating": True, **fbd}
    return dataclasses.replace(parse(f"{MODEL} {more}".split()), fbd=FbdConfig(**options))


@pytest.mark.parametrize(
    ("more", "fbd", "problem"),
    [
        (
            "",
            {"forward_backward_disaggregating": False, "fbd_forward_ranks_apart": True},
            "--fbd-forward-ranks-apart needs --forward-backward-disaggregating",
        ),
        (
            "",
            {"forward_backward_disaggregating": False, "ignore_forward_tensor_parallel": True},
            "--ignore-forward-tensor-parallel needs --forward-backward-disaggregating",
        ),
        (
            "",
            {"ignore_forward_tensor_parallel": True, "fbd_backward_per_forward": 2},
            "--fbd-backward-per-forward 2 and --ignore-forward-tensor-parallel exclude each other",
        ),
        (
            "",
            {"forward_backward_disaggregating": False, "fbd_ship": "saved"},
            "--fbd-ship needs --forward-backward-disaggregating",
        ),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel",
            {"ignore_forward_tensor_parallel": True, "fbd_ship": "full"},
            "--hidden-dropout 0.1 cannot be combined with --ignore-forward-tensor-parallel, --sequence-parallel and "
            "--fbd-ship full: what a backward rank computes again would have another mask",
        ),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full "
            "--recompute-method uniform --recompute-num-layers 1",
            {"ignore_forward_tensor_parallel": True},
            "--hidden-dropout 0.1 cannot be combined with --ignore-forward-tensor-parallel, --sequence-parallel and "
            "--recompute-granularity full: ",
        ),
        (
            "--use-dpp --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2",
            {},
            "--use-dpp and --forward-backward-disaggregating need --tensor-model-parallel-size 1, not 2",
        ),
        (
            "--use-dpp --pipeline-model-parallel-size 2 --dpp-schedule zero-bubble",
            {},
            "--dpp-schedule zero-bubble cannot be combined with --forward-backward-disaggregating",
        ),
        (
            "--use-dpp --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --dpp-placement vee",
            {},
            "--dpp-placement vee cannot be combined with --forward-backward-disaggregating",
        ),
        (
            "--use-dpp --pipeline-model-parallel-size 2 --dpp-memory-cap 4",
            {},
            "--dpp-memory-cap means nothing with --forward-backward-disaggregating",
        ),
        (
            "--transport native --pipeline-model-parallel-size 2",
            {},
            "--transport native and --forward-backward-disaggregating cannot be combined yet",
        ),
        (
            "--attention-dropout 0.1",
            {"ignore_forward_tensor_parallel": True},
            "--attention-dropout 0.1 cannot be combined with --ignore-forward-tensor-parallel: torch draws one mask",
        ),
        (
            "",
            {"forward_backward_disaggregating": False, "fbd_forward_on_cpu": True},
            "--fbd-forward-on-cpu needs --forward-backward-disaggregating",
        ),
        (
            "--hidden-dropout 0",
            {"fbd_forward_on_cpu": True},
            "--fbd-forward-on-cpu needs --fbd-ship full, as CPUs and GPUs save different tensors of a layer",
        ),
        ("--hidden-dropout 0 --recompute-activations", {"fbd_forward_on_cpu": True}, ON_CPU_SHIPS_FULL),
        ("--hidden-dropout 0", {"fbd_forward_on_cpu": True, "fbd_ship": "auto"}, ON_CPU_SHIPS_FULL),
        (
            "--hidden-dropout 0 --recompute-granularity full --recompute-method block --recompute-num-layers 2",
            {"fbd_forward_on_cpu": True},
            "--fbd-forward-on-cpu cannot be combined with --recompute-method block",
        ),
        (
            "",
            {"fbd_forward_on_cpu": True, "fbd_ship": "full"},
            "--hidden-dropout 0.1 cannot be combined with --fbd-forward-on-cpu: CPUs and GPUs draw different masks",
        ),
        (
            "--hidden-dropout 0 --attention-dropout 0.2",
            {"fbd_forward_on_cpu": True, "fbd_ship": "full"},
            "--attention-dropout 0.2 cannot be combined with --fbd-forward-on-cpu",
        ),
        (
            "--hidden-dropout 0 --transformer-impl transformer_engine",
            {"fbd_forward_on_cpu": True, "fbd_ship": "full"},
            "--transformer-impl transformer_engine cannot be combined with --fbd-forward-on-cpu",
        ),
    ],
)
def test_combinations_that_cannot_run_are_refused_by_name(more: str, fbd: dict[str, Any], problem: str) -> None:
    (found,) = fbd_problems(config_of(more, **fbd))
    assert found.startswith(problem)


def test_accepted_combinations_have_no_problem() -> None:
    assert not list(fbd_problems(config_of("--attention-dropout 0.1", fbd_backward_per_forward=2)))
    for schedule in ("auto", "dfc", "bfc", "static"):
        roles = f"--use-dpp --pipeline-model-parallel-size 2 --dpp-placement loop --dpp-schedule {schedule}"
        assert not list(fbd_problems(config_of(roles)))
    assert not list(fbd_problems(config_of(ignore_forward_tensor_parallel=True, fbd_forward_ranks_apart=True)))
    for ship in ("saved", "selective"):
        recomputed = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        more = f"--tensor-model-parallel-size 2 --sequence-parallel {recomputed}"
        assert not list(fbd_problems(config_of(more, ignore_forward_tensor_parallel=True, fbd_ship=ship)))
    still = "--hidden-dropout 0 --recompute-granularity full --recompute-num-layers 2 --recompute-method"
    assert not list(fbd_problems(config_of(f"{still} uniform", fbd_forward_on_cpu=True)))
    assert not list(fbd_problems(config_of(f"{still} block", fbd_forward_on_cpu=True, fbd_ship="full")))
    assert not list(fbd_problems(parse(MODEL.split())))


@pytest.mark.parametrize(
    ("more", "ship", "modes"),
    [
        ("", None, ["saved"]),
        ("--recompute-activations", None, ["selective"]),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2", None, ["full"]),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2", "saved", ["saved"]),
        ("", "full", ["full"]),
        ("", "auto", ["saved", "selective", "full"]),
    ],
)
def test_what_is_shipped_follows_the_flag_or_the_recomputation(more: str, ship: str | None, modes: list[str]) -> None:
    assert list(config_of(more, fbd_ship=ship).ship_modes) == modes


def test_a_world_that_holds_no_whole_replicas_is_refused() -> None:
    with pytest.raises(UsageError, match="6 ranks cannot be divided into replicas of 4 forward and backward ranks"):
        config_of("--tensor-model-parallel-size 2").fbd_world(6)


@pytest.mark.parametrize("fbd", [{}, {"ignore_forward_tensor_parallel": True}, {"fbd_backward_per_forward": 2}])
def test_the_batch_is_divided_over_the_trained_replicas(fbd: dict[str, Any]) -> None:
    config = config_of("--tensor-model-parallel-size 2 --global-batch-size 12", **fbd)
    ranks = config.world_size(4)
    world = config.fbd_world(ranks)
    assert world is not None
    assert world.trained == Topology(tensor=2, data=4)
    with pytest.raises(UsageError, match="--global-batch-size 12 is not a multiple of --micro-batch-size 2 x 4"):
        check_world(config, world.trained.data)
    check_world(config, 2)


def test_addresses_are_counted_over_the_ranks_of_both_roles() -> None:
    addresses = ",".join(f"10.0.0.{number}" for number in range(4))
    check_world(config_of(f"--node-ips {addresses}"), 2)
    with pytest.raises(UsageError, match="--node-ips: 4 addresses for 8 ranks"):
        check_world(config_of(f"--node-ips {addresses}"), 4)


def layouts(world: FbdWorld, monkeypatch: pytest.MonkeyPatch) -> list[Layout]:
    made = []
    for rank in range(world.world_size):
        for name, value in {"RANK": rank, "WORLD_SIZE": world.world_size, "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, str(value))
        made.append(
            layout_from_environment(
                tensor_size=world.trained.tensor, pipeline_size=world.trained.pipeline, virtual_size=1, fbd=world
            )
        )
    return made


@pytest.mark.parametrize(
    "world",
    [
        fbd_world(tensor=2, pipeline=2, data=2),
        fbd_world(tensor=2, pipeline=2, data=1, merged=True),
        fbd_world(tensor=1, pipeline=2, data=4, backward_per_forward=2),
        fbd_world(tensor=2, pipeline=1, data=2, merged=True, apart=True),
    ],
)
def test_a_layout_is_that_of_the_role_and_knows_the_launchers_rank(
    world: FbdWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = layouts(world, monkeypatch)
    assert [layout.global_rank for layout in made] == list(range(world.world_size))
    assert {layout.global_world_size for layout in made} == {world.world_size}
    assert {layout.trained_data_size for layout in made} == {world.trained.data}
    for layout in made:
        assert layout.topology == world.topology_of(layout.role)
        assert layout.role is world.role_of(layout.global_rank)
    for role in (RankRole.FORWARD, RankRole.BACKWARD):
        ranks = sorted(layout.rank for layout in made if layout.role is role)
        assert ranks == list(range(world.topology_of(role).world_size))
    (reporter,) = [layout for layout in made if layout.is_reporter]
    assert reporter.role is RankRole.BACKWARD
    assert not reporter.data_rank and reporter.is_last_stage


@pytest.mark.parametrize(
    ("world", "places"),
    [
        (fbd_world(tensor=1, pipeline=1, data=4, backward_per_forward=2), [0, 1, None, 2, 3, None]),
        (fbd_world(tensor=2, pipeline=1, data=1, apart=True), [0, 1, None, None]),
    ],
)
def test_backward_ranks_alone_take_gpus_of_their_node_if_forward_ranks_run_on_the_cpu(
    world: FbdWorld, places: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = layouts(world, monkeypatch)
    assert [layout.gpu_place(FbdConfig(fbd_forward_on_cpu=True)) for layout in made] == places
    assert [layout.gpu_place(FbdConfig()) for layout in made] == list(range(world.world_size))
    last_backward = [layout for layout in made if layout.role is RankRole.BACKWARD][-1]
    assert dataclasses.replace(last_backward, local_rank=0).gpu_place(FbdConfig(fbd_forward_on_cpu=True)) == 0


def test_layers_of_merged_forward_ranks_are_whole() -> None:
    config = config_of("--tensor-model-parallel-size 2 --sequence-parallel", ignore_forward_tensor_parallel=True)
    forward = config.of_role(RankRole.FORWARD).parallel
    assert (forward.tensor_model_parallel_size, forward.sequence_parallel) == (1, False)
    assert config.of_role(RankRole.BACKWARD) is config
    unmerged = config_of("--tensor-model-parallel-size 2")
    assert unmerged.of_role(RankRole.FORWARD) is unmerged


def test_a_trace_names_ranks_as_the_launcher_does(monkeypatch: pytest.MonkeyPatch) -> None:
    world = fbd_world(tensor=2, pipeline=2, data=1, merged=True)
    made = layouts(world, monkeypatch)
    documents = [
        json.loads(
            ring_metadata(
                RunContext(config=config_of(), layout=layout, device_name="cpu", chunks=(), num_microbatches=1),
                communicators(layout, {"mp": range(layout.world_size)}),
                None,
            )
        )
        for layout in made
    ]
    assert [document["rank"] for document in documents] == list(range(6))
    assert [document["role"] for document in documents] == ["backward", "backward", "forward"] * 2
    forward, backward = documents[2], documents[1]
    assert [comm["members"] for comm in forward["comms"]] == [
        *([5, 2], [2, 5]),
        *([0, 2], [2, 0], [1, 2], [2, 1]),  # its partners
        [2, 5],
    ]
    assert [comm["members"] for comm in backward["comms"]] == [
        *([4, 1], [1, 4]),
        *([2, 1], [1, 2]),
        [0, 1, 3, 4],
    ]
    numbering = {"tensor": 2, "data": 1, "merged": True, "backwardPerForward": 1, "apart": False}
    assert all(document["fbd"] == numbering and document["world"] == 6 for document in documents)
