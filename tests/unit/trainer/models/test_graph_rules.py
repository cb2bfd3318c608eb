"""Which trainings replay CUDA graphs, and which kernels of attention they take first."""

import dataclasses
import importlib.util

import pytest

from megatronapp_trainer.config import TrainerConfig, parse
from megatronapp_trainer.config.rules.graphs import overlaps_by_default, reasons_against_graphs, uses_slots
from megatronapp_trainer.errors import UsageErrors

SMALL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 --train-iters 1 "
    "--lr 1e-3 --mock-data --vocab-size 64"
)
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
NCCL_TIMES = (
    "--trace-nccl with --tensor-model-parallel-size above 1 (--cuda-graph-impl local replays, without NCCL's times of "
    "these collectives)"
)


def config_of(flags: str) -> TrainerConfig:
    return parse(f"{SMALL} {flags}".split())


@pytest.mark.parametrize(
    ("flags", "reasons"),
    [
        (NO_DROPOUT, ()),
        ("", ("dropout",)),
        (f"{NO_DROPOUT} --cuda-graph-impl none", ("--cuda-graph-impl none",)),
        (f"{NO_DROPOUT} --trace --fp16", ()),
        (f"{NO_DROPOUT} --trace --pipeline-model-parallel-size 2 --use-dpp", ()),
        (f"{NO_DROPOUT} --trace --tensor-model-parallel-size 2", ()),
        (f"{NO_DROPOUT} --trace --trace-nccl --tensor-model-parallel-size 2", (NCCL_TIMES,)),
        (f"{NO_DROPOUT} --trace --trace-nccl --pipeline-model-parallel-size 2", ()),
        (f"{NO_DROPOUT} --tensor-model-parallel-size 2 --sequence-parallel --cuda-graph-impl auto", ()),
        (f"{NO_DROPOUT} --overlap-grad-reduce --tensor-model-parallel-size 2", ("--overlap-grad-reduce",)),
        (f"{NO_DROPOUT} --overlap-grad-reduce --use-distributed-optimizer --overlap-param-gather", ()),
        *(
            (f"{NO_DROPOUT} {layout} --cuda-graph-impl local", ())
            for layout in (
                "--tensor-model-parallel-size 2 --sequence-parallel --trace --trace-nccl",
                "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --fp16",
                "--pipeline-model-parallel-size 2 --use-dpp --overlap-grad-reduce",
            )
        ),
        (f"{NO_DROPOUT} --transformer-impl local", ("--transformer-impl local",)),
        (f"{NO_DROPOUT} --recompute-activations", ("--recompute-granularity",)),
        (f"{NO_DROPOUT} --context-parallel-size 2", ("--context-parallel-size above 1",)),
    ],
)
def test_what_keeps_passes_out_of_graphs_is_named(flags: str, reasons: tuple[str, ...]) -> None:
    assert reasons_against_graphs(config_of(flags)) == reasons


def with_packed_documents() -> TrainerConfig:
    config = config_of(NO_DROPOUT)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, reset_attention_mask=True))


def test_packed_documents_keep_passes_out_of_graphs() -> None:
    assert reasons_against_graphs(with_packed_documents()) == ("--reset-attention-mask",)


@pytest.mark.torch
def test_packed_documents_leave_the_order_of_kernels_to_torch() -> None:
    from megatronapp_trainer.models.attention_backends import order_of_backends

    assert order_of_backends(with_packed_documents()) is None


@pytest.mark.parametrize(
    "obstacle",
    [
        "--context-parallel-size 2",
        "--pipeline-model-parallel-size 2 --recompute-granularity selective",
        "--forward-backward-disaggregating",
    ],
)
def test_graphs_that_cannot_be_are_refused(obstacle: str) -> None:
    named = obstacle.split()[-2] if " " in obstacle else obstacle
    with pytest.raises(UsageErrors, match=f"--cuda-graph-impl local cannot be combined with {named}"):
        config_of(f"{NO_DROPOUT} {obstacle} --cuda-graph-impl local")


@pytest.mark.parametrize(
    ("layout", "in_slots"),
    [
        ("", False),
        ("--use-distributed-optimizer --overlap-grad-reduce", False),
        ("--fp16", True),
        ("--tensor-model-parallel-size 2", True),
        ("--pipeline-model-parallel-size 2", True),
        ("--pipeline-model-parallel-size 2 --use-dpp", True),
    ],
)
def test_only_a_stage_without_collectives_has_no_slots(layout: str, in_slots: bool) -> None:
    assert uses_slots(config_of(f"{NO_DROPOUT} {layout}")) == in_slots


@pytest.mark.parametrize(
    ("flags", "replicas", "overlaps"),
    [
        ("", 2, True),
        ("--use-distributed-optimizer --fp8-format e4m3 --bf16", 8, True),
        ("", 1, False),
        ("--no-overlap-data-parallel", 2, False),
        ("--overlap-grad-reduce", 2, False),  # by its own flag
        ("--cuda-graph-impl none", 2, False),
        ("--distributed-backend gloo", 2, False),
        ("--tensor-model-parallel-size 2", 2, False),
        ("--fp16", 2, False),
    ],
)
def test_transfers_overlap_by_default_where_whole_microbatches_are_replayed(
    flags: str, replicas: int, overlaps: bool
) -> None:
    assert overlaps_by_default(config_of(f"{NO_DROPOUT} {flags}"), data_size=replicas) == overlaps


@pytest.mark.torch
@pytest.mark.parametrize(
    ("flags", "replicas", "gathers", "averages"),
    [
        ("", 2, False, True),
        ("", 3, False, False),  # a third is not exact
        ("--calculate-per-token-loss", 2, False, False),
        ("--use-distributed-optimizer", 4, True, False),  # a switch adds them up, and takes no means
        ("--use-distributed-optimizer --ddp-average-in-collective", 6, True, True),
        ("--use-distributed-optimizer --fp8-format e4m3 --bf16", 2, False, True),
    ],
)
def test_flags_of_transfers_that_overlap_by_default(flags: str, replicas: int, gathers: bool, averages: bool) -> None:
    found = with_overlap_on("cuda", flags, replicas)
    assert found.parallel.overlap_grad_reduce
    assert found.parallel.overlap_param_gather == gathers
    assert found.parallel.ddp_average_in_collective == averages


@pytest.mark.torch
def test_transfers_do_not_overlap_by_default_on_a_cpu() -> None:
    assert with_overlap_on("cpu", "--use-distributed-optimizer", 2) == config_of(
        f"{NO_DROPOUT} --use-distributed-optimizer"
    )


def test_overlap_is_not_both_on_and_off() -> None:
    with pytest.raises(UsageErrors, match=r"--no-overlap-data-parallel and --overlap-grad-reduce exclude each other"):
        config_of("--no-overlap-data-parallel --overlap-grad-reduce")


def with_overlap_on(device_type: str, flags: str, replicas: int) -> TrainerConfig:
    """Return the configuration of a rank that holds the whole model."""
    import torch

    from megatronapp_trainer.device import Device
    from megatronapp_trainer.parallel.layout import Layout
    from megatronapp_trainer.training.build import with_overlap

    layout = Layout(rank=0, world_size=replicas, local_rank=0, tensor_size=1, pipeline_size=1, virtual_size=1)
    device = Device(torch_device=torch.device(device_type), name=device_type)
    return with_overlap(config_of(f"{NO_DROPOUT} {flags}"), layout, device)


def with_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: find("json" if name == "transformer_engine" else name)
    )


def test_layers_of_an_installed_transformer_engine_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    with_transformer_engine(monkeypatch)
    (reason,) = reasons_against_graphs(config_of(NO_DROPOUT))
    assert reason == "Transformer Engine, which is installed, without --transformer-impl torch"
    assert reasons_against_graphs(config_of(f"{NO_DROPOUT} --transformer-impl torch")) == ()
    assert reasons_against_graphs(config_of(f"{NO_DROPOUT} --bf16 --fp8-format e4m3")) == ()


@pytest.mark.torch
@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        (NO_DROPOUT, "transformer_engine"),
        (f"{NO_DROPOUT} --context-parallel-size 2", "torch"),
        (f"{NO_DROPOUT} --bf16 --fp8-format e4m3", "torch"),
        ("--model-type bert --max-position-embeddings 16 --vocab-size 64", "torch"),
    ],
)
def test_layers_of_a_run_where_transformer_engine_is_installed(
    flags: str, layers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatronapp_trainer.models.layers import implementation_of

    config = config_of(flags)
    with_transformer_engine(monkeypatch)
    assert implementation_of(config) == layers


@pytest.mark.torch
def test_a_graph_reads_copies_of_all_tensors_of_a_microbatch() -> None:
    import torch

    from megatronapp_trainer.data.microbatches import Microbatch
    from megatronapp_trainer.pipeline.graphs.pass_slot import copied_tensors

    tokens = torch.arange(4).view(1, 4)
    batch = Microbatch(
        tokens=tokens,
        labels=tokens + 1,
        loss_mask=torch.ones(1, 4),
        loss_tokens=torch.tensor(4.0),
        position_ids=torch.arange(4).expand(1, 4),
        attention_mask=None,
        sample_tokens=torch.tensor(4.0),
        context_size=1,
        sources=torch.ones(1, 2),
    )
    copies = copied_tensors(batch)
    tensors = {field.name for field in dataclasses.fields(batch)} - {"attention_mask", "context_size"}
    assert copies.keys() == tensors
    for name, copied in copies.items():
        given = getattr(batch, name)
        assert torch.equal(copied, given)
        assert copied.data_ptr() != given.data_ptr()


@pytest.mark.parametrize(
    ("flags", "first"),
    [
        (NO_DROPOUT, "CUDNN_ATTENTION"),
        ("", None),
        (f"{NO_DROPOUT} --deterministic-mode", None),
        (f"{NO_DROPOUT} --window-size 7,0", None),
        (f"{NO_DROPOUT} --context-parallel-size 2 --cp-comm-type a2a", "CUDNN_ATTENTION"),
        (f"{NO_DROPOUT} --attention-backend flash", "FLASH_ATTENTION"),
        ("--attention-backend fused", "CUDNN_ATTENTION"),
    ],
)
@pytest.mark.torch
def test_the_first_kernel_of_attention(flags: str, first: str | None) -> None:
    from megatronapp_trainer.models.attention_backends import order_of_backends

    order = order_of_backends(config_of(flags))
    assert (None if order is None else order[0].name) == first
