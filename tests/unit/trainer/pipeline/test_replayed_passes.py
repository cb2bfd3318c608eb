"""Passes replayed in slots train as passes without recordings, to the last bit, in every layout that has them."""

import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import replayed_training
from replayed_training import Trained

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]

STEPS = 4
PATIENCE_S = 280.0
"""Limit of two trainings on a computer that is busy."""
MODEL = (
    f"--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    f"--global-batch-size 8 --train-iters {STEPS} --lr 2e-3 --lr-decay-style cosine --lr-warmup-iters 2 --mock-data "
    "--vocab-size 120 --attention-dropout 0 --hidden-dropout 0 --eval-iters 1 --eval-interval 2"
)
PP2 = "--pipeline-model-parallel-size 2"
PP4 = "--pipeline-model-parallel-size 4 --num-layers 8"
VPP2 = "--num-virtual-stages-per-pipeline-rank 2"
TP2 = "--tensor-model-parallel-size 2"
SP = "--sequence-parallel"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"
LAYOUTS = {
    "TP2": (2, TP2, ""),
    "TP2-SP-bf16": (2, f"{TP2} {SP} --bf16", ""),
    "TP2-local-layers": (2, f"{TP2} --transformer-impl torch --swiglu --normalization RMSNorm --qk-layernorm", ""),
    "TP2xDP2-overlap": (4, f"{TP2} {OVERLAP}", ""),
    "fp16": (1, "--fp16 --initial-loss-scale 4096", ""),
    "PP2": (2, PP2, ""),
    "PP2-fp8": (2, f"{PP2} --bf16 --fp8-format e4m3 --transformer-impl torch", ""),
    "MegaDPP-zb-fp8": (
        2,
        f"{PP2} --bf16 --fp8-format e4m3 --transformer-impl torch",
        "--use-dpp --dpp-schedule zero-bubble",
    ),
    "PP2-untied-fp16": (2, f"{PP2} --fp16 --initial-loss-scale 4096 --untie-embeddings-and-output-weights", ""),
    "PP2-VPP2": (2, f"{PP2} {VPP2}", ""),
    "PP2-VPP2-no-overlap": (2, f"{PP2} {VPP2} --no-overlap-p2p-communication", ""),
    "PP4-VPP2": (4, f"{PP4} {VPP2} --untie-embeddings-and-output-weights", ""),
    "PP4-per-token-loss": (4, f"{PP4} --calculate-per-token-loss", ""),
    "PP2xDP2-overlap": (4, f"{PP2} {VPP2} {OVERLAP}", ""),
    "PP4-growing-batch": (4, f"{PP4} --rampup-batch-size 2 2 16", ""),
    "TP2xPP2": (4, f"{TP2} {PP2} {SP}", ""),
    "MegaDPP-static": (2, PP2, "--use-dpp --dpp-schedule static"),
    "MegaDPP-zero-bubble": (2, PP2, "--use-dpp --dpp-schedule zero-bubble"),
    "MegaDPP-dfc-VPP2": (2, f"{PP2} {VPP2}", "--use-dpp --dpp-schedule dfc"),
    "MegaDPP-bfc": (4, PP4, "--use-dpp --dpp-schedule bfc"),
    "MegaDPP-VPP2": (2, f"{PP2} {VPP2}", "--use-dpp"),
    "MegaDPP-vee": (2, f"{PP2} {VPP2} --use-dpp --dpp-schedule zero-bubble", ""),
    "MegaDPP-byte-cap": (2, PP2, "--use-dpp --dpp-memory-cap 4MiB"),
    "MegaDPP-DP2-overlap": (4, f"{PP2} {OVERLAP}", "--use-dpp"),
    "MegaDPP-TP2-SP": (4, f"{TP2} {PP2} {SP}", "--use-dpp"),
}
"""Ranks, flags of both runs, and flags of the run with recordings alone."""
CORNERS = ("PP2-VPP2", "MegaDPP-TP2-SP")


def compare(layout: str, seed: int | None) -> tuple[Trained, Trained]:
    _, flags, more = LAYOUTS[layout]
    return replayed_training.compare(f"{MODEL} {flags}", f"{MODEL} {flags} {more}", seed)


@pytest.mark.full("a sweep of layouts", but=CORNERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_replayed_passes_train_to_the_bit_as_others(run_ranks: RunRanks, layout: str) -> None:
    world, flags, more = LAYOUTS[layout]
    dynamic = "--use-dpp" in f"{flags} {more}"
    splits = dynamic and not any(schedule in more for schedule in ("static", "dfc", "bfc"))
    seed = 5 if "--use-dpp" in more and "static" not in more and "zero-bubble" not in more else None
    results = run_ranks(world, compare, layout, seed, timeout_s=PATIENCE_S)
    for expected, found in results:
        assert expected.losses == found.losses
        assert expected.norms == found.norms
        assert expected.forwards == []
        assert found.forwards[0] == 0, "the first step runs without recordings"
        assert all(found.forwards[1:]), found.forwards
        assert all(0 < slots <= 8 for slots in found.slots)
        assert (found.weights > 0) == splits
    assert any(loss for expected, _ in results for loss in expected.losses)


def inputs_at_recordings() -> list[bool]:
    """Return for each recorded slot whether its chunk still has the input of an earlier pass."""
    from megatronapp_trainer.pipeline.graphs import replayed_passes

    module: Any = replayed_passes
    found = []

    def slot(passes: Any, *arguments: Any) -> Any:
        found.append(module._input_of(passes.chunk) is not None)
        return whole(passes, *arguments)

    whole = module.PassSlot
    module.PassSlot = slot
    flags = f"{MODEL} {PP2} --use-dpp --dpp-schedule zero-bubble {replayed_training.LOCAL}"
    replayed_training.train(flags)
    return found


def test_no_input_of_an_earlier_pass_is_let_go_by_a_recording(run_ranks: RunRanks) -> None:
    found = run_ranks(2, inputs_at_recordings, timeout_s=PATIENCE_S)
    assert all(of_rank and not any(of_rank) for of_rank in found)


def rounded_within_replays(flags: str) -> tuple[int, int]:
    """Return how often a replay has read a weight in 8 bits, and how often of these it would have rounded it."""
    from megatronapp_trainer.models.kernels.fp8 import Quantized
    from megatronapp_trainer.models.kernels.fp8_weights import Fp8Weight
    from megatronapp_trainer.pipeline.graphs.pass_slot import PassSlot

    replays, found = [False], list[bool]()
    forward, backward, rows, columns = PassSlot.forward, PassSlot.backward, Fp8Weight.rows, Fp8Weight.columns

    def replayed(compute: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            replays[0] = True
            try:
                return compute(*arguments)
            finally:
                replays[0] = False

        return run

    def reading(form: Callable[[Fp8Weight], Quantized], step_of: str) -> Callable[[Fp8Weight], Quantized]:
        def read(weight: Fp8Weight) -> Quantized:
            if replays[0]:
                found.append(getattr(weight, step_of) != weight._weights.step)
            return form(weight)

        return read

    module: Any = PassSlot
    module.forward, module.backward = replayed(forward), replayed(backward)
    weights: Any = Fp8Weight
    weights.rows, weights.columns = reading(rows, "_rows_of"), reading(columns, "_columns_of")
    replayed_training.train(f"{MODEL} {flags} {replayed_training.LOCAL}")
    return len(found), sum(found)


@pytest.mark.full("graphs read weights that are rounded before them: a GPU's tests find it, too")
@pytest.mark.parametrize(
    ("world", "flags"),
    [
        pytest.param(2, f"{PP2} {VPP2} --use-dpp", id="MegaDPP-VPP2"),
        pytest.param(2, f"{PP2} --rampup-batch-size 2 2 16", id="PP2-growing-batch"),
    ],
)
def test_no_replay_rounds_a_weight(run_ranks: RunRanks, world: int, flags: str) -> None:
    flags = f"{flags} --bf16 --fp8-format e4m3 --transformer-impl torch"
    for read, rounded in run_ranks(world, rounded_within_replays, flags, timeout_s=PATIENCE_S):
        assert read > 0
        assert rounded == 0


def with_hooks() -> tuple[Trained, Trained]:
    """Train with a hook in the model during the fourth step, with recordings and without."""
    flags = f"{MODEL} --train-iters 7 --fp16 --initial-loss-scale 4096"
    hooks: list[Any] = []

    def before_step(run: Any, step: int) -> None:
        while hooks:
            hooks.pop().remove()
        if step == 3:
            module = next(iter(run.state.chunks[0].modules()))
            hooks.append(module.register_forward_hook(lambda *_: None))

    plain = replayed_training.train(f"{flags} {replayed_training.NONE}")
    return plain, replayed_training.train(f"{flags} {replayed_training.LOCAL}", before_step=before_step)


def test_a_step_with_hooks_and_its_successor_run_without_recordings(run_ranks: RunRanks) -> None:
    ((plain, found),) = run_ranks(1, with_hooks, timeout_s=PATIENCE_S)
    assert found.forwards == [0, 8, 8, 0, 0, 8, 8]
    assert found.losses == plain.losses


def late_reader() -> tuple[list[float], list[bool], list[int]]:
    """Return results that a replay has overwritten, and whether they are NaN after the end of their microbatch."""
    import torch

    from megatronapp_trainer.pipeline.graphs.recorders import RepeatingRecorders

    recorder = RepeatingRecorders().slot()
    given = torch.ones(3)
    recording = recorder.record(lambda: (given * 2, torch.ones(2, dtype=torch.int64)))
    first = recording.replay()
    given.fill_(5.0)
    second = recording.replay()
    overwritten = first[0].tolist()
    recorder.spoil(second)
    return overwritten, first[0].isnan().tolist(), first[1].tolist()


def test_what_is_read_too_late_is_no_number(run_ranks: RunRanks) -> None:
    assert [tuple(found) for found in run_ranks(1, late_reader)] == [([10.0] * 3, [True] * 3, [1, 1])]


def other_shape() -> str:
    """Return why a microbatch of fewer samples cannot be replayed."""
    import dataclasses

    import small_training

    from megatronapp_trainer.models.registry import model_family
    from megatronapp_trainer.pipeline.graphs.pass_slot import ChunkPasses, PassExample, PassSlot, TensorForm
    from megatronapp_trainer.pipeline.graphs.recorders import RepeatingRecorders

    run = small_training.prepare(MODEL)
    (chunk,) = run.state.chunks
    family = model_family(run.config)
    batch = family.example_batch(run.config, run.layout, run.device)
    passes = ChunkPasses(chunk=chunk, family=family, has_loss=True, store=None, split=False, set_input=lambda _: None)
    example = PassExample(batch=batch, received=None, output=TensorForm.of(batch.loss_tokens))
    slot = PassSlot(passes, example, RepeatingRecorders().slot())
    slot.forward(batch, None)
    try:
        slot.forward(dataclasses.replace(batch, labels=batch.labels[:, :-1]), None)
    except ValueError as error:
        return str(error)
    return ""


def test_a_microbatch_of_another_shape_is_refused(run_ranks: RunRanks) -> None:
    (message,) = run_ranks(1, other_shape)
    assert message == "labels of a microbatch has the shape [1, 15], and its passes were recorded for [1, 16]"


def without_memory() -> str:
    """Return what a training prints whose second step finds no memory for recordings."""
    import torch

    from megatronapp_trainer.pipeline.graphs import recorders

    shortage = mock.patch.object(
        recorders._RepeatingRecorder, "record", side_effect=torch.OutOfMemoryError("CUDA out of memory")
    )
    try:
        with shortage:
            replayed_training.train(f"{MODEL} --fp16 {replayed_training.LOCAL}")
    except torch.OutOfMemoryError as error:
        return "".join(traceback.format_exception_only(error))
    return ""


def test_a_shortage_of_memory_names_the_flag_that_takes_less(run_ranks: RunRanks) -> None:
    (printed,) = run_ranks(1, without_memory)
    assert "CUDA out of memory" in printed
    assert "--cuda-graph-impl none" in printed
