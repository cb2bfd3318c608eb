"""The places where another schedule, transport, model family or role of ranks is added."""

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest
import small_training
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.names import ExitCode
from megatronapp_common.topology import RankRole, Topology
from megatronapp_common.trace import RecordKind
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.parallel.layout import Layout

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 2 --train-iters 2 --lr 2e-3 --mock-data --vocab-size 120 --eval-iters 1"
)
LONE = Layout(rank=0, world_size=1, local_rank=0, tensor_size=1, pipeline_size=1, virtual_size=1)


def test_an_unknown_schedule_is_refused() -> None:
    from megatronapp_trainer.pipeline.registry import create_schedule

    context: Any = None
    with pytest.raises(UsageError, match=r"no pipeline schedule 'random'; take one of: static, dynamic"):
        create_schedule("random", context)


def test_an_unknown_model_type_is_refused() -> None:
    from megatronapp_trainer.models.registry import model_family

    config: Any = types.SimpleNamespace(model=types.SimpleNamespace(type="t5"))
    with pytest.raises(UsageError, match=r"no model type 't5'; take one of: gpt, bert"):
        model_family(config)


def test_every_flag_describes_a_registered_family_and_schedule() -> None:
    from megatronapp_trainer.config import parse
    from megatronapp_trainer.models.registry import FAMILIES
    from megatronapp_trainer.pipeline.registry import SCHEDULES

    config = parse(MODEL.split())
    assert config.model.type in FAMILIES
    assert config.schedule in SCHEDULES


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 3))
def test_a_layout_has_the_coordinates_of_its_topology(tensor: int, context: int, data: int, pipeline: int) -> None:
    topology = Topology(tensor=tensor, context=context, expert=context, data=data, pipeline=pipeline)
    reporters = 0
    for rank in range(topology.world_size):
        layout = dataclasses.replace(
            LONE,
            rank=rank,
            world_size=topology.world_size,
            tensor_size=tensor,
            pipeline_size=pipeline,
            context_size=context,
            expert_size=context,
        )
        place = topology.coordinates(rank)
        assert (layout.context_rank, layout.expert_rank) == (place.cp, place.ep)
        assert (layout.tensor_rank, layout.data_rank, layout.pipeline_rank) == (place.tp, place.dp, place.pp)
        reporters += layout.is_reporter
    assert reporters == 1


class CountingRequest:
    """A request that counts its waits."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> str:
        self.waits += 1
        return "finished"


class ReceivingTransport:
    """A transport that receives one tensor from the previous stage."""

    next_rank = 3
    prev_rank = 1

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.request = CountingRequest()
        self.posted: list[dict[str, Any]] = []

    def post(self, **transfers: Any) -> Any:
        from megatronapp_trainer.parallel.transport import PostedTransfers

        self.posted.append(transfers)
        return PostedTransfers(self.tensor, None, {"recv_prev": self.request})

    def close(self, *, drain: bool = True) -> None: ...


class RecordedSpans:
    """A recorder that keeps the kinds of its records."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def host_mark(self) -> None: ...

    def transfer(self, key: Any, _mark: Any, size: int) -> None:
        self.kinds.append(f"{key.kind.name} {size}")

    def enter(self, _key: Any) -> None: ...

    def leave(self, key: Any, _mark: Any) -> None:
        self.kinds.append(key.kind.name)


def test_a_traced_transport_delegates_and_records_each_wait_once() -> None:
    import torch

    from megatronapp_trainer.scan.peers import PeerCounters
    from megatronapp_trainer.scan.traced_transport import TracedTransport

    inner, spans, withheld = ReceivingTransport(torch.zeros(4)), RecordedSpans(), list[int]()
    recorder: Any = spans
    traced = TracedTransport(
        inner, recorder=recorder, peers=PeerCounters(2, {(1, 2): 0, (2, 1): 1}), withhold=withheld.append
    )
    shape = [4]
    posted = traced.post(send_next=None, send_prev=None, recv_prev=True, recv_next=False, tensor_shape=shape)
    assert (traced.next_rank, traced.prev_rank) == (3, 1)
    assert posted.from_prev is inner.tensor
    assert inner.posted == [
        {"send_next": None, "send_prev": None, "recv_prev": True, "recv_next": False, "tensor_shape": shape}
    ]
    request = posted.requests["recv_prev"]
    assert request.wait() == "finished"
    assert request.wait() is None
    assert inner.request.waits == 1
    assert spans.kinds == ["RECV_POST 16", "RECV_WAIT"]
    assert withheld == [1]


def evaluate_on_a_forward_rank(flags: str) -> tuple[Any, Any, Any, Any]:
    """Optimizer and learning-rate schedule of a forward rank, and its validation loss next to an ordinary rank's."""
    from megatronapp_trainer.data.microbatches import BatchSource
    from megatronapp_trainer.training.build import build_iterators, build_run, build_schedule
    from megatronapp_trainer.training.evaluate import evaluate

    ordinary = small_training.prepare(flags)
    layout = dataclasses.replace(ordinary.layout, role=RankRole.FORWARD)
    forward = build_run(ordinary.config, layout, ordinary.device, vocab_size=120)
    losses = []
    for run in (forward, ordinary):
        iterators = build_iterators(run.config, run.layout, 0)
        assert iterators.valid is not None
        source = BatchSource(run.config, run.layout, run.device)
        losses.append(evaluate(run, build_schedule(run), source, iterators.valid))
    return forward.state.optimizer, forward.state.scheduler, losses[0], losses[1]


def test_a_forward_rank_has_no_optimizer_and_computes_the_same_loss(run_ranks: RunRanks) -> None:
    ((optimizer, scheduler, forward_loss, loss),) = run_ranks(1, evaluate_on_a_forward_rank, MODEL)
    assert optimizer is None
    assert scheduler is None
    assert forward_loss == loss
    assert loss.mean == loss.by_name["lm loss"] > 0


class SequentialSchedule:
    """Forward and backward pass of one microbatch after another, on one stage without megatron-core's schedules."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def train(self, feed: Any, num_microbatches: int) -> list[Any]:
        context, (chunk,) = self._context, self._context.chunks
        reports = []
        for microbatch in range(num_microbatches):
            batch = feed.take(0, microbatch)
            context.observer.begin(RecordKind.FORWARD, 0, microbatch)
            total, tokens, report = context.family.loss(context.family.forward(chunk, batch), batch)
            context.observer.end(RecordKind.FORWARD)
            context.observer.begin(RecordKind.BACKWARD, 0, microbatch)
            context.optimizer.scale_loss(total / tokens / num_microbatches).backward()
            context.observer.end(RecordKind.BACKWARD)
            reports.append(report)
        chunk.finish_grad_sync()
        return reports

    def evaluate(self, feed: Any, num_microbatches: int) -> list[Any]:
        raise AssertionError("no evaluation is due")

    def close(self, code: ExitCode = ExitCode.OK) -> None:
        """End nothing: this schedule shares nothing."""


class DictionaryFamily:
    """GPT whose microbatches are dictionaries."""

    def __getattr__(self, name: str) -> Any:
        from megatronapp_trainer.models import gpt

        return getattr(gpt, name)

    def batch_source(self, config: Any, layout: Any, device: Any) -> Any:
        return DictionarySource(self.__getattr__("batch_source")(config, layout, device))

    def forward(self, model: Any, batch: Any) -> Any:
        return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    def loss(self, output: Any, batch: Any) -> Any:
        from megatronapp_trainer.models.language_model_loss import token_loss

        return token_loss(output, batch["loss_mask"], batch["loss_tokens"])


class DictionarySource:
    """Source of microbatches as dictionaries."""

    together = 1
    reading_chunks = frozenset({0})

    def __init__(self, source: Any) -> None:
        self._source = source

    def work(self, batch: Any) -> Any:
        from megatronapp_trainer.data.microbatches import MicrobatchWork

        return MicrobatchWork(tokens=batch["tokens"].numel())

    def read(self, iterator: Any, count: int) -> list[Any]:
        return [
            {name: getattr(batch, name) for name in batch.__slots__} for batch in self._source.read(iterator, count)
        ]


def train_with(schedule: str, family: str) -> tuple[list[tuple[str, str, int]], list[float], list[float]]:
    """Passes, losses and gradient norms of a run with a schedule and a family that were registered before it."""
    from megatronapp_trainer.config import ModelConfig, TrainerConfig
    from megatronapp_trainer.models.registry import FAMILIES
    from megatronapp_trainer.pipeline.registry import SCHEDULES
    from megatronapp_trainer.training.build import build_iterators, build_schedule
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    SCHEDULES["sequential"] = SequentialSchedule
    FAMILIES["dictionary"] = DictionaryFamily()
    patch = pytest.MonkeyPatch()  # in a process of this test's own
    patch.setattr(TrainerConfig, "schedule", property(lambda _config: schedule))
    patch.setattr(ModelConfig, "type", property(lambda _config: family))
    run = small_training.prepare(f"{MODEL} --global-batch-size 4 --eval-iters 0 --train-iters 3")
    observer: Any = PassObserver()
    iterators = build_iterators(run.config, run.layout, 0)
    schedule_of_run = build_schedule(run, observer)
    trainer = Trainer(run, iterators, schedule_of_run, stop_request=StopRequest(), observer=observer)
    outcomes = [trainer.step() for _ in range(3)]
    tokens = run.config.training.micro_batch_size * run.config.model.seq_length
    reported = [(microbatch, tokens) for _ in outcomes for microbatch in range(4)]
    assert observer.tokens == (reported if family == "dictionary" else [])
    return (
        observer.passes,
        [outcome.loss.mean for outcome in outcomes],
        [outcome.grad_norm or 0 for outcome in outcomes],
    )


class PassObserver:
    """Observer that keeps the passes, and the reported work."""

    collectives = None

    def __init__(self) -> None:
        self.passes: list[tuple[str, str, int]] = []
        self.tokens: list[tuple[int, int]] = []

    def work(self, microbatch: int, *, tokens: int, pairs: int) -> None:
        assert pairs == 0
        self.tokens.append((microbatch, tokens))

    def begin(self, kind: RecordKind, _chunk: int, microbatch: int, *, early: bool = False) -> None:
        if kind in {RecordKind.FORWARD, RecordKind.BACKWARD}:
            self.passes.append(("begin", kind.name, microbatch))

    def end(self, kind: RecordKind) -> None:
        if kind in {RecordKind.FORWARD, RecordKind.BACKWARD}:
            self.passes.append(("end", kind.name, -1))

    def announcement(self) -> tuple[float, ...]:
        return 0.0, 3.0

    def agreed(self, sums: Any) -> None:
        assert tuple(sums) == (0.0, 3.0), "of one rank"

    def step_begin(self, _step: int) -> None: ...

    def step_end(self, _metrics: Any) -> None: ...


@pytest.mark.parametrize(("schedule", "family"), [("sequential", "gpt"), ("static", "dictionary")])
def test_a_registered_schedule_and_family_train_without_a_change_of_the_loop(
    run_ranks: RunRanks, schedule: str, family: str
) -> None:
    (expected,) = run_ranks(1, train_with, "static", "gpt")
    assert run_ranks(1, train_with, schedule, family) == [expected]
    assert len(expected[0]) == 3 * 4 * 4


def train_with_write_hooks(names: list[str]) -> dict[str, tuple[bool, bool]]:
    """For each site, if losses are those without a hook: with a copy of the value, and with 1.1 times the value."""
    from megatronapp_trainer.hooks.interventions import WriteHooks
    from megatronapp_trainer.hooks.sites import site_of

    def losses(name: str, factor: float) -> list[float]:
        run = small_training.prepare(f"{MODEL} --micro-batch-size 2 --global-batch-size 4 --eval-iters 0")
        trainer = small_training.trainer_of(run)
        WriteHooks(run.state.chunks[0].module).add(site_of(name), lambda value, _layer: factor * value)
        return [trainer.step().loss.mean for _ in range(2)]

    unchanged = small_training.trainer_of(small_training.prepare(f"{MODEL} --micro-batch-size 2 --global-batch-size 4"))
    expected = [unchanged.step().loss.mean for _ in range(2)]
    return {name: (losses(name, 1.0) == expected, losses(name, 1.1) == expected) for name in names}


def test_write_hooks_take_effect_in_training_and_a_copy_changes_no_bit(run_ranks: RunRanks) -> None:
    names = ["embedding", "attention_output", "mlp_in", "mlp1", "mlp2", "residual", "final_norm", "logits"]
    assert run_ranks(1, train_with_write_hooks, names) == [dict.fromkeys(names, (True, False))]


def announced_by_a_rank(figures: list[tuple[float, ...]]) -> list[tuple[list[list[float]], tuple[float, ...]]]:
    """For each of these announcements, what was sent to the device, and its sums."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    from megatronapp_trainer.device import Device
    from megatronapp_trainer.models.language_model_loss import reduce_loss

    class NotingDevice(Device):
        def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
            sent.append(tensor.tolist())
            return super().to_device(tensor)

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    device, found = NotingDevice(torch_device=torch.device("cpu"), name="cpu"), []
    for announced in figures:
        sent: list[list[float]] = []
        sums = reduce_loss([], LONE, device, names=["lm loss"], announced=announced).read().announced
        found.append((sent, sums))
    dist.destroy_process_group()
    return found


def test_announcements_are_sent_to_the_device_without_a_wait_for_its_passes(run_ranks: RunRanks) -> None:
    """Torch's own copy from the host to a GPU waits until all passes of the step have been computed."""
    ((nothing, some),) = run_ranks(1, announced_by_a_rank, [(0.0, 0.0), (0.0, 3.0)])
    assert nothing == ([], (0.0, 0.0))
    assert some == ([[0.0, 0.0, 0.0, 0.0, 0.0, 3.0]], (0.0, 3.0))
