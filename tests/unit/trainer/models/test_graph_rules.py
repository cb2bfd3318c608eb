"""Which trainings replay CUDA graphs, and which kernels of attention they take first."""

import pytest

from megatronapp_trainer.config import TrainerConfig, parse
from megatronapp_trainer.config.rules.graphs import reasons_against_graphs

SMALL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 --train-iters 1 "
    "--lr 1e-3 --mock-data --vocab-size 64"
)
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"


def config_of(flags: str) -> TrainerConfig:
    return parse(f"{SMALL} {flags}".split())


@pytest.mark.parametrize(
    ("flags", "reasons"),
    [
        (NO_DROPOUT, ()),
        ("", ("dropout",)),
        (f"{NO_DROPOUT} --cuda-graph-impl none", ("--cuda-graph-impl none",)),
        (f"{NO_DROPOUT} --trace --fp16", ("--fp16",)),
        (
            f"{NO_DROPOUT} --trace --tensor-model-parallel-size 2",
            ("--trace with --tensor-model-parallel-size above 1", "--tensor-model-parallel-size above 1"),
        ),
        (f"{NO_DROPOUT} --pipeline-model-parallel-size 2", ("--pipeline-model-parallel-size above 1",)),
        (f"{NO_DROPOUT} --tensor-model-parallel-size 2", ("--tensor-model-parallel-size above 1",)),
        (f"{NO_DROPOUT} --tensor-model-parallel-size 2 --cuda-graph-impl local", ()),
        (
            f"{NO_DROPOUT} --tensor-model-parallel-size 2 --sequence-parallel --cuda-graph-impl auto",
            ("--sequence-parallel", "--tensor-model-parallel-size above 1"),
        ),
        (f"{NO_DROPOUT} --transformer-impl local", ("--transformer-impl local",)),
        (f"{NO_DROPOUT} --recompute-activations", ("--recompute-granularity",)),
    ],
)
def test_what_keeps_passes_out_of_graphs_is_named(flags: str, reasons: tuple[str, ...]) -> None:
    assert reasons_against_graphs(config_of(flags)) == reasons


@pytest.mark.parametrize(
    ("flags", "first"),
    [
        (NO_DROPOUT, "CUDNN_ATTENTION"),
        ("", None),
        (f"{NO_DROPOUT} --deterministic-mode", None),
        (f"{NO_DROPOUT} --window-size 7,0", None),
        (f"{NO_DROPOUT} --attention-backend flash", "FLASH_ATTENTION"),
        ("--attention-backend fused", "CUDNN_ATTENTION"),
    ],
)
@pytest.mark.torch
def test_the_first_kernel_of_attention(flags: str, first: str | None) -> None:
    from megatronapp_trainer.models.attention_backends import order_of_backends

    order = order_of_backends(config_of(flags))
    assert (None if order is None else order[0].name) == first
