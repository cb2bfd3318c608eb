"""A memory cap in bytes holds for what autograd and pending weight tasks really keep, and is refused if too small."""

import importlib
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import late_inputs
import pytest
import small_training
from recording_reporter import RecordingReporter

from megatronapp_common.names import ExitCode

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 8 --train-iters 3 --lr 2e-3 --mock-data --vocab-size 120 --attention-dropout 0 "
    "--hidden-dropout 0 --eval-iters 0 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
)
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


class Saved:
    """A tensor that autograd has saved, alive as long as autograd needs it."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor.detach()


class LiveMemory:
    """Measures after each task from the second step on what the tasks of this process keep."""

    def __init__(self) -> None:
        import torch

        from megatronapp_trainer.pipeline.task_passes import TaskPasses

        self.peak = 0
        self._saved: weakref.WeakSet[Saved] = weakref.WeakSet()
        self._steps = 0
        live = self

        class Measured(TaskPasses):
            def begin_step(self, *arguments: Any) -> None:
                super().begin_step(*arguments)
                live._steps += 1

            def forward(self, *arguments: Any) -> Any:
                if live._steps == 1:  # the product measures in the first step, with hooks of the same kind
                    return super().forward(*arguments)
                with torch.autograd.graph.saved_tensors_hooks(live._pack, lambda saved: saved.tensor):
                    output = super().forward(*arguments)
                live._measure(self)
                return output

            def backward(self, *arguments: Any) -> Any:
                gradient = super().backward(*arguments)
                live._measure(self)
                return gradient

            def weight(self, *arguments: Any) -> None:
                super().weight(*arguments)
                live._measure(self)

        dynamic: Any = importlib.import_module("megatronapp_trainer.pipeline.dynamic")
        dynamic.TaskPasses = Measured

    def _pack(self, tensor: Any) -> Saved:
        saved = Saved(tensor)
        self._saved.add(saved)
        return saved

    def _measure(self, passes: Any) -> None:
        if self._steps > 1:
            parameters = {part.untyped_storage().data_ptr() for chunk in passes._chunks for part in chunk.parameters()}
            storages = {storage.data_ptr(): storage.nbytes() for storage in self._storages(passes)}
            self.peak = max(self.peak, sum(size for place, size in storages.items() if place not in parameters))

    def _storages(self, passes: Any) -> Iterator[Any]:
        yield from (saved.tensor.untyped_storage() for saved in self._saved)
        yield from (
            tensor.untyped_storage() for both in passes._saved.values() for tensor in both if tensor is not None
        )
        for store in passes._stores:
            for products in store._collected.values():
                for product in products:
                    yield from product.storages


def train(flags: str) -> tuple[list[str], int, list[float]]:
    """Lines that the schedule reports, the most bytes that the tasks of this rank kept, and losses."""
    from megatronapp_trainer.training.build import build_iterators, build_schedule
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    live = LiveMemory()
    run = small_training.prepare(f"{MODEL} {flags}")
    if "--use-dpp" in flags:
        late_inputs.install(3 + run.layout.rank)
    lines: list[str] = []
    recorder: Any = RecordingReporter()
    schedule = build_schedule(run, report=lines.append)
    iterators = build_iterators(run.config, run.layout, 0)
    Trainer(run, iterators, schedule, stop_request=StopRequest(), reporter=recorder).train()
    schedule.close()
    return lines, live.peak, recorder.losses


def kib(text: str) -> int:
    found = re.search(r"keeps up to (\d+)KiB", text)
    assert found is not None, text
    return int(found[1])


@pytest.mark.full("a sweep of schedules", but=("auto",))
@pytest.mark.parametrize(
    ("world", "schedule", "flags"),
    [
        pytest.param(2, "auto", "", id="auto"),
        pytest.param(2, "auto", RECOMPUTED, id="recomputed"),
        pytest.param(2, "auto", "--dpp-placement vee", id="vee"),
        pytest.param(4, "auto", "--tensor-model-parallel-size 2 --sequence-parallel", id="TP2"),
        pytest.param(4, "auto", "--use-distributed-optimizer --overlap-grad-reduce --bf16", id="DP2-bf16"),
        pytest.param(2, "dfc", "", id="dfc"),
        pytest.param(2, "bfc", RECOMPUTED, id="bfc"),
    ],
)
def test_a_cap_in_bytes_holds(run_ranks: RunRanks, world: int, schedule: str, flags: str) -> None:
    def results(cap: str) -> tuple[int, int, list[float]]:
        """Least cap, peak of all ranks, and losses."""
        ranks = run_ranks(world, train, f"{flags} --use-dpp --dpp-schedule {schedule} --dpp-memory-cap {cap}")
        lines = {line for lines, _, _ in ranks for line in lines}
        assert len(lines) == 1, "the ranks agree"
        return kib(lines.pop()), max(peak for _, peak, _ in ranks), next(list(found) for *_, found in ranks if found)

    least, most_peak, losses = results("1GiB")
    assert most_peak > least << 10, "without a cap that holds, ranks keep more"
    for cap in (least, (least + (most_peak >> 10)) // 2):
        again, peak, same_losses = results(f"{cap}KiB")
        assert again == least
        assert 0 < peak <= cap << 10
        assert same_losses == losses
    with pytest.raises(Exception, match=f"give {least}KiB or more"):
        results(f"{least - 1}KiB")


def exit_code(flags: str) -> tuple[int, str]:
    """Exit code and errors of a run on this rank."""
    import contextlib
    import io
    import warnings

    from megatronapp_trainer.pretrain import main

    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(flags.split())
    return int(code), errors.getvalue()


@pytest.mark.full("a run that ends in its first step")
def test_a_run_whose_cap_is_too_small_ends_as_a_wrong_command_line(run_ranks: RunRanks) -> None:
    results = run_ranks(2, exit_code, f"{MODEL} --use-dpp --dpp-memory-cap 100KiB")
    assert [code for code, _ in results] == [ExitCode.USAGE] * 2
    assert all("--dpp-memory-cap 100KiB: in the static order rank 0" in errors for _, errors in results)
