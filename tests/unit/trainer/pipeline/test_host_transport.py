"""Trainings whose stages exchange tensors through copies in the host's memory."""

from collections.abc import Callable
from typing import Any

import pytest
import small_training

pytestmark = pytest.mark.torch
RunRanks = Callable[..., list[Any]]
MODEL = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --vocab-size 61 "
    "--make-vocab-size-divisible-by 4 --global-batch-size 4 --lr 3e-3 --mock-data --train-iters 3 --eval-interval 2 "
    "--eval-iters 1 --attention-dropout 0 --hidden-dropout 0"
)


def trained(flags: str, in_host: bool) -> tuple[list[float], list[float]] | None:
    """Return losses and gradient norms on the rank that reports them."""
    if in_host:
        from megatron.core import parallel_state

        from megatronapp_trainer.pipeline.transport.host_transport import HostTransport
        from megatronapp_trainer.training import build

        def transport(run: Any) -> HostTransport:
            group = parallel_state.get_pipeline_model_parallel_group()
            return HostTransport(group, run.core_config.pipeline_dtype, run.device.torch_device)

        build._stage_transport = transport
    recorder = small_training.train(small_training.prepare(f"{MODEL} {flags}"))
    return None if recorder is None else (recorder.losses, recorder.grad_norms)


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        pytest.param(2, "--pipeline-model-parallel-size 2", id="PP2"),
        pytest.param(2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", id="PP2-chunks"),
        pytest.param(
            3,
            "--pipeline-model-parallel-size 3 --num-layers 3 --bf16",
            id="PP3",
            marks=pytest.mark.full("a further size"),
        ),
    ],
)
def test_copies_in_the_host_change_no_bit(run_ranks: RunRanks, world: int, flags: str) -> None:
    results = [run_ranks(world, trained, flags, in_host) for in_host in (False, True)]
    expected, found = ([result for result in ranks if result] for ranks in results)
    assert len(found) == 1 and found == expected
