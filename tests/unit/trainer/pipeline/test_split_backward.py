"""The split backward pass: bit-equal to megatron-core's layers, each parameter ready once, nothing retained after W."""

import math
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from pytest_workers import FULL
from split_training import GROUPED, LATE, MICROBATCHES, MIXED, WHOLE, Executor, Task, tasks_of, trace

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]
TENSOR = "--tensor-model-parallel-size 2"
SEQUENCE = f"{TENSOR} --sequence-parallel"
PIPELINE = "--pipeline-model-parallel-size 2"
OVERLAP = "--overlap-grad-reduce --ddp-bucket-size 4000"
UNTIED = "--untie-embeddings-and-output-weights"
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE_RECOMPUTE = "--recompute-granularity selective"
STEPS = 4 if FULL else 2
VARIANTS = {"late": LATE, "mixed": MIXED} | ({"whole": WHOLE} if FULL else {})
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"


def compare(cases: list[str]) -> list[str]:
    """Return the cases whose trace with split layers differs from that of megatron-core's, or in which none changes."""
    wrong = []
    for flags in cases:
        expected = trace(flags, WHOLE, split=False, steps=STEPS)
        if expected[1:] == expected[:-1]:
            wrong.append(f"{flags}: no step changes anything")
        for name, tasks in VARIANTS.items():
            if trace(flags, tasks, steps=STEPS) != expected:
                wrong.append(f"{flags}: {name}")
    return wrong


CASES = {
    "alone": (
        1,
        [
            "",
            f"{GROUPED} --bf16",
            f"{UNTIED} {FULL_RECOMPUTE}",
            f"{GROUPED} {SELECTIVE_RECOMPUTE} --add-qkv-bias --qk-layernorm",
        ],
    ),
    "TP2": (2, [f"{TENSOR} {UNTIED} --qk-layernorm", f"{SEQUENCE} {GROUPED}"]),
    "DP2": (2, [f"{GROUPED} --use-distributed-optimizer --overlap-param-gather {OVERLAP}"]),
    "PP2": (2, [PIPELINE]),
    "alone-more": (
        1,
        [
            GROUPED,
            "--bf16",
            FULL_RECOMPUTE,
            f"{UNTIED} {DROPOUT} {FULL_RECOMPUTE}",
            f"{GROUPED} --bf16 {SELECTIVE_RECOMPUTE}",
            "--transformer-impl local --openai-gelu",
            "--calculate-per-token-loss",
        ],
    ),
    "TP2-more": (
        2,
        [
            f"{layout} {model} {recompute}"
            for layout in (TENSOR, SEQUENCE)
            for model in ("", f"{GROUPED} --bf16")
            for recompute in (FULL_RECOMPUTE, SELECTIVE_RECOMPUTE)
        ],
    ),
    "DP2-more": (
        2,
        [
            "",
            OVERLAP,
            f"--use-distributed-optimizer {OVERLAP} --ddp-average-in-collective",
            f"{GROUPED} --bf16 {OVERLAP}",
        ],
    ),
    "PP2-more": (2, [f"{PIPELINE} {GROUPED}", f"{PIPELINE} --bf16", f"{PIPELINE} {FULL_RECOMPUTE}"]),
    "TP2xDP2": (4, [f"{SEQUENCE} {UNTIED} --use-distributed-optimizer {OVERLAP}", f"{TENSOR} {OVERLAP}"]),
    "TP2xPP2": (4, [f"{SEQUENCE} {PIPELINE}"]),
}


@pytest.mark.full("a sweep of layouts and models", but=("alone", "TP2", "DP2", "PP2"))
@pytest.mark.parametrize(("world", "cases"), CASES.values(), ids=list(CASES))
def test_split_passes_are_bit_equal_to_megatron_core(run_ranks: RunRanks, world: int, cases: list[str]) -> None:
    assert run_ranks(world, compare, cases) == [[]] * world


def try_orders(flags: str, examples: int) -> None:
    """Compare the gradients of generated orders of tasks with those of whole backward passes."""
    from hypothesis import given, settings
    from hypothesis import strategies as st

    plain = Executor(flags, split=False)
    plain.gradients(0, WHOLE)
    expected = plain.digests()
    executor = Executor(flags, split=True)

    @settings(max_examples=examples, deadline=None, database=None, derandomize="CI" in os.environ)
    @given(
        *(st.lists(part, min_size=MICROBATCHES, max_size=MICROBATCHES) for part in (st.booleans(), st.integers(0, 4)))
    )
    def check(splits: list[bool], waits: list[int]) -> None:
        executor.gradients(0, tasks_of(splits, waits))
        assert executor.digests() == expected

    check()


def test_the_delay_of_weight_gradients_changes_no_bit(run_ranks: RunRanks) -> None:
    run_ranks(1, try_orders, GROUPED, 100 if FULL else 10)


def compare_replicas(flags: str, orders: list[list[Task]]) -> bool:
    """Return whether replicas that run tasks in different orders have the trace of whole passes."""
    rank = int(os.environ["RANK"])
    expected = trace(flags, WHOLE, split=False)
    return trace(flags, orders[rank % len(orders)]) == expected


@pytest.mark.parametrize(
    ("world", "flags", "orders"),
    [
        pytest.param(2, "--use-distributed-optimizer", [LATE, WHOLE], id="sharded"),
        pytest.param(2, GROUPED, [MIXED, LATE], id="whole"),
        pytest.param(4, f"{SEQUENCE} --use-distributed-optimizer", [LATE, LATE, WHOLE, WHOLE], id="TP2"),
    ],
)
@pytest.mark.full("another layout", but=("sharded",))
def test_replicas_may_run_tasks_in_different_orders(
    run_ranks: RunRanks, world: int, flags: str, orders: list[list[Task]]
) -> None:
    assert run_ranks(world, compare_replicas, f"{flags} {OVERLAP}", orders) == [True] * world


PARAMETERS = 2 * 12 + 4
"""Parameters of the model without flags: 12 of each layer, two of the final norm, two embeddings."""


def readiness(flags: str, tasks: list[Task]) -> tuple[list[tuple[str, Task]], list[tuple[str, Task]]]:
    """Events of the third step: registrations of the last microbatch, and reductions; each with its task."""
    executor = Executor(flags, split=True)
    names = {parameter: name for name, parameter in executor.chunk.named_parameters()}
    ready: list[tuple[str, Task]] = []
    reductions: list[tuple[str, Task]] = []

    def watch(group: Any) -> None:
        register, start = group.register_grad_ready, group.start_grad_sync

        def registered(parameter: Any, *options: Any) -> None:
            if group.is_last_microbatch:
                ready.append((names[parameter], executor.task))
            register(parameter, *options)

        def started(*options: Any, **more: Any) -> None:
            reductions.append((f"after {len(ready)}", executor.task))
            start(*options, **more)

        group.register_grad_ready, group.start_grad_sync = registered, started

    for group in executor.chunk.bucket_groups:
        watch(group)
    for number in range(3):
        ready.clear()
        reductions.clear()
        executor.step(number, tasks)
    return ready, reductions


def test_parameters_are_ready_once_and_reductions_begin_while_w_runs(run_ranks: RunRanks) -> None:
    last = MICROBATCHES - 1
    for ready, reductions in run_ranks(2, readiness, f"--use-distributed-optimizer {OVERLAP}", LATE):
        tasks = dict(ready)
        assert len(ready) == len(tasks) == PARAMETERS
        for name, task in tasks.items():
            assert task == (("W", last) if ".linear_" in name and name.endswith("weight") else ("B", last)), name
        assert {task for _, task in reductions} == {("B", last), ("W", last)}  # none waits for the step's end
        during_w = [event for event, task in reductions if task == ("W", last)]
        assert len(during_w) > 1
        assert during_w[0] != f"after {PARAMETERS}"


@pytest.mark.full("another order")
def test_whole_passes_make_parameters_ready_once(run_ranks: RunRanks) -> None:
    for ready, reductions in run_ranks(2, readiness, f"--use-distributed-optimizer {OVERLAP}", WHOLE):
        assert len(ready) == len(dict(ready)) == PARAMETERS
        assert {task for _, task in ready + reductions} == {("BW", MICROBATCHES - 1)}


def retained(flags: str) -> tuple[list[int], int]:
    """Bytes of pending products after each B, and at the end of a step without W between; checks their storages."""
    from torch.multiprocessing.reductions import StorageWeakRef

    executor = Executor(flags, split=True)
    store: Any = executor.store
    collect, counted = store.collect, []
    alive: dict[int, list[Any]] = {}

    def collected(product: Any) -> None:
        references = [StorageWeakRef(part) for part in product.storages]  # type: ignore[no-untyped-call]
        alive.setdefault(executor.task[1], []).extend(references)
        collect(product)

    def after(task: Task) -> None:
        kind, microbatch = task
        if kind == "B":
            assert not any(reference.expired() for reference in alive[microbatch])
            counted.append(store.retained_bytes)
        elif kind == "W":
            await_freed(alive[microbatch])

    store.collect = collected
    executor.step(0, tasks_of((True,) * MICROBATCHES, (0,) * MICROBATCHES), after)
    return counted, store.retained_bytes


def await_freed(references: list[Any]) -> None:
    """Wait until all storages are freed: after a gather has ended, gloo's thread has its tensors a moment longer."""
    end = time.monotonic() + 120
    while not all(reference.expired() for reference in references):
        assert time.monotonic() < end, "W has run, and an operand is still alive"
        time.sleep(0.001)


def expected_bytes(*, tensor: int, sequence: int) -> int:
    """Bytes of a microbatch by the table of docs/megadpp.md: 32 tokens in fp32, GROUPED with 2 layers."""
    hidden, queries, keys, width, vocabulary = 32, 32, 16, 64, 128
    layer = {
        "linear_qkv": hidden // sequence + (queries + 2 * keys) // tensor,
        "linear_proj": queries // tensor + hidden,
        "linear_fc1": hidden // sequence + 2 * width // tensor,
        "linear_fc2": width // tensor + hidden,
    }
    return 4 * 32 * (2 * sum(layer.values()) + hidden // sequence + vocabulary // tensor)


@pytest.mark.parametrize(
    ("world", "flags", "microbatch"),
    [
        pytest.param(1, GROUPED, expected_bytes(tensor=1, sequence=1), id="alone"),
        pytest.param(2, f"{SEQUENCE} {GROUPED}", expected_bytes(tensor=2, sequence=2), id="SP2"),
        pytest.param(2, f"{TENSOR} {GROUPED} {FULL_RECOMPUTE}", expected_bytes(tensor=2, sequence=1), id="TP2"),
    ],
)
@pytest.mark.full("a sweep of layouts", but=("SP2",))
def test_pending_products_retain_the_bytes_of_the_docs_until_w(
    run_ranks: RunRanks, world: int, flags: str, microbatch: int
) -> None:
    steps = [microbatch * count for count in range(1, MICROBATCHES + 1)]
    assert run_ranks(world, retained, flags) == [(steps, 0)] * world


ORDERS = {
    "B before its turn": [("F", 0), ("F", 1), ("B", 1)],
    "B of no microbatch": [*LATE, ("F", MICROBATCHES), ("B", MICROBATCHES)],
    "W without B": [("F", 0), ("W", 0)],
    "W twice": [("F", 0), ("B", 0), ("W", 0), ("W", 0)],
    "W before an earlier W": [("F", 0), ("F", 1), ("B", 0), ("B", 1), ("W", 1)],
    "whole B before W": [("F", 0), ("F", 1), ("B", 0), ("BW", 1)],
    "W missing at the end": LATE[:-1],
    "B missing at the end": [("F", 0), ("B", 0), ("W", 0)],
    "operand overwritten": [("F", 0), ("B", 0), ("W", 0)],
}
REFUSALS = {
    "B before its turn": "backward pass of microbatch 1 of chunk 0 begins out of turn: the next one is 0 of 4",
    "B of no microbatch": "backward pass of microbatch 4 of chunk 0 begins out of turn",
    "W without B": "(W) of microbatch 0 of chunk 0 are not the next ones; pending, in this order: none",
    "W twice": "(W) of microbatch 0 of chunk 0 are not the next ones; pending, in this order: none",
    "W before an earlier W": "(W) of microbatch 1 of chunk 0 are not the next ones; pending, in this order: 0, 1",
    "whole B before W": "backward pass of microbatch 1 begins while weight gradients (W) of chunk 0 have not run, of "
    "microbatches 0",
    "W missing at the end": "the step ends while weight gradients (W) of chunk 0 have not run, of microbatches 3",
    "B missing at the end": "the step ends after the backward passes of 1 of 4 microbatches of chunk 0",
    "operand overwritten": "an operand of the weight gradients (W) of microbatch 0 of chunk 0 was written into",
}


def overwriting(store: Any) -> Callable[[Task], None]:
    """Write into an operand of the first pending product after each B."""

    def overwrite(task: Task) -> None:
        if task[0] == "B":
            store._collected[task[1]][0].output_gradient.zero_()

    return overwrite


def refusals(orders: dict[str, list[Task]]) -> dict[str, str]:
    """Texts of the errors about each order of tasks, and about the step after one that lacks a W."""
    from megatronapp_trainer.errors import TaskOrderError

    texts = {}
    for name, tasks in orders.items():
        executor = Executor("", split=True)
        after = overwriting(executor.store) if name == "operand overwritten" else lambda task: None
        with pytest.raises(TaskOrderError) as error:
            executor.gradients(0, tasks, after)
        texts[name] = str(error.value)
        if name == "W missing at the end":
            with pytest.raises(TaskOrderError) as error:
                executor.gradients(1, tasks)
            texts["next step"] = str(error.value)
    return texts


def test_orders_that_would_change_sums_are_refused(run_ranks: RunRanks) -> None:
    (texts,) = run_ranks(1, refusals, ORDERS)
    for name, text in {**REFUSALS, "next step": "a step begins while weight gradients (W) of chunk 0"}.items():
        assert text in texts[name]


def train(flags: str, *, split: bool) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of two steps of the trainer, under megatron-core's own schedule."""
    import small_training

    from megatronapp_trainer.pipeline.split_backward import install_split_backward

    run = small_training.prepare(flags)
    names = set(run.state.chunks[0].state_dict())
    if split:
        install_split_backward(run.state.chunks)
        assert set(run.state.chunks[0].state_dict()) == names
    trainer = small_training.trainer_of(run)
    outcomes = [trainer.step() for _ in range(2)]
    return [outcome.loss.mean for outcome in outcomes], [outcome.grad_norm or math.nan for outcome in outcomes]


def train_both(flags: str) -> bool:
    return train(flags, split=True) == train(flags, split=False)


def test_installed_layers_run_whole_under_another_schedule(run_ranks: RunRanks) -> None:
    from split_training import MODEL

    assert run_ranks(2, train_both, f"{MODEL} --global-batch-size 8 {GROUPED} {OVERLAP} --eval-iters 0") == [True] * 2


def reasons() -> dict[str, dict[str, str]]:
    """Layers that are not split, of models and of changed modules."""
    import torch
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    from megatronapp_trainer.pipeline.split_backward import unsplit_layers

    class OwnLinear(ColumnParallelLinear):  # type: ignore[misc] # megatron-core carries no types
        """Class of a plugin."""

    tied, grouped = Executor("", split=False).chunk, Executor(f"{GROUPED} --bf16", split=False).chunk
    found = {
        "tied": unsplit_layers(tied),
        "untied": unsplit_layers(grouped),
        "output layer whole": unsplit_layers(grouped, output_layer=False),
    }
    layer = grouped.module.module.decoder.layers[0]
    layer.mlp.linear_fc1.__class__ = OwnLinear
    layer.mlp.linear_fc2.gradient_accumulation_fusion = True
    layer.self_attention.linear_proj = torch.nn.Linear(32, 32)
    layer.self_attention.linear_qkv.weight.requires_grad = False
    return {**found, "changed": unsplit_layers(grouped)}


def test_what_cannot_be_split_is_named_with_the_reason(run_ranks: RunRanks) -> None:
    (found,) = run_ranks(1, reasons)
    assert found == {
        "tied": {"output_layer": "shares its weight within the chunk: autograd adds both gradients up first"},
        "untied": {},
        "output layer whole": {"output_layer": "left whole, as asked"},
        "changed": {
            "decoder.layers.0.mlp.linear_fc1": "OwnLinear has its own backward pass",
            "decoder.layers.0.mlp.linear_fc2": "adds its gradient in Apex' kernel (gradient_accumulation_fusion)",
            "decoder.layers.0.self_attention.linear_proj": "Linear has its own backward pass",
        },
    }


def fused() -> tuple[list[Any], list[Any], list[Any], str]:
    """Traces with fused products in two orders, one without, and what is said about bf16 on a CPU."""
    from megatronapp_trainer.errors import UsageError

    with pytest.raises(UsageError) as error:
        Executor(f"{GROUPED} --bf16", split=True, fused=True)
    late, mixed = (trace(GROUPED, tasks, fused=True) for tasks in (LATE, MIXED))
    return late, mixed, trace(GROUPED, WHOLE, split=False), str(error.value)


def test_fused_products_do_not_depend_on_the_order_of_tasks(run_ranks: RunRanks) -> None:
    ((late, mixed, plain, refusal),) = run_ranks(1, fused)
    assert late == mixed
    for (losses, _), (expected, _) in zip(late, plain, strict=True):
        assert losses == pytest.approx(expected, rel=1e-5)
    assert refusal == (
        "cpu has no product of torch.bfloat16 that adds to torch.float32: split the backward pass with fused=False"
    )
