"""Ranks of the gangs of `gpu_fbd.py`: each trains as `pretrain` does, step by step as its commander asks."""

import dataclasses
import hashlib
import itertools
import os
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection
from typing import Any

Figures = dict[str, Any]
KEY = b"bench"
"""Key of the socket, which lies in a private folder."""


@dataclasses.dataclass(frozen=True)
class Gang:
    """Ranks that run together, on devices of their own choice."""

    name: str
    ranks: int
    flags: str
    gpus: int
    """GPUs that it uses, for figures per GPU."""
    first_gpu: int = 0
    stages: int = 1
    """Stages of its pipelines, each with the layers of the bench."""
    deterministic: bool = False
    competes: bool = False
    """True if it only keeps its device busy."""


def work(address: str, token: str, flags: str) -> None:
    """Serve the commander until it ends the gang."""
    warnings.simplefilter("ignore")
    connection = Client(address, authkey=KEY)
    connection.send((token, int(os.environ["RANK"])))
    if flags == "compete":
        compete(connection)
    else:
        GangRank(connection, flags).serve()


def compete(connection: "Connection[Any, Any]") -> None:
    """Keep the device busy from a command "busy" to the next command."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = 8192 if device.type == "cuda" else 64
    matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    connection.send({"role": "competitor"})
    while (command := connection.recv())[0] != "end":
        connection.send({})
        while command[0] == "busy" and not connection.poll():
            for _ in range(4):  # some 6 ms each on an H100
                matrix @ matrix
            if device.type == "cuda":
                torch.cuda.synchronize()


class GangRank:
    """A rank of plain training or of MegaFBD."""

    def __init__(self, connection: "Connection[Any, Any]", flags: str) -> None:
        import torch
        from bench_device import BenchDevice

        from megatronapp_common.topology import RankRole
        from megatronapp_trainer.config import parse
        from megatronapp_trainer.device import prepare_device
        from megatronapp_trainer.launch.ranks.connections import CONNECTIONS, device_connections
        from megatronapp_trainer.parallel.groups import initialize_groups
        from megatronapp_trainer.parallel.seeds import apply_deterministic_mode
        from megatronapp_trainer.training.build import build_run, layout_of, vocab_size_of

        self._connection = connection
        config = parse(flags.split())
        layout = layout_of(config)
        os.environ[CONNECTIONS] = device_connections(flags.split(), layout.role)
        apply_deterministic_mode(config)
        device = prepare_device(layout.gpu_place(config.fbd), config.parallel.ranks_per_gpu)
        if layout.gpu_place(config.fbd) is None:
            torch.set_num_threads(max(len(os.sched_getaffinity(0)) - 2, 1))  # the backward rank has the others
        initialize_groups(config, layout, device)
        self._is_forward = layout.role is RankRole.FORWARD
        config = config.of_role(layout.role) if self._is_forward else config
        self._run = build_run(config, layout, device, vocab_size=vocab_size_of(config), drawn=not self._is_forward)
        self._device = BenchDevice(device.torch_device)
        self._passes = pass_times(self._device)
        self._role = str(layout.role)
        self._lines: list[str] = []

    def serve(self) -> None:
        """Run what is asked, as one of the three roles."""
        from megatronapp_trainer.parallel.groups import destroy_groups

        if self._is_forward:
            self._serve_forward()
        else:
            self._serve_steps()
        destroy_groups()

    def _serve_forward(self) -> None:
        """Let the backward ranks command; after each step the commander gets the figures of this rank."""
        from megatronapp_trainer.fbd import setup

        issue = IssueTimer()
        issue.install()
        patched: Any = setup
        patched.build_iterators = lambda config, layout, *_place, **_order: sampled_iterators(self._run, layout)

        def report() -> None:
            self._connection.send(self._passes.take() | issue.take())

        self._passes.at_end = report
        forward = setup.build_forward_rank(self._run, lambda run: self._passes, stop_requested=lambda: False)
        self._connection.send({"role": self._role})
        forward.serve()

    def _serve_steps(self) -> None:
        from megatronapp_common.topology import RankRole
        from megatronapp_trainer.fbd import setup
        from megatronapp_trainer.fbd.tuning.ship_tuner import Publishing
        from megatronapp_trainer.training.build import build_schedule
        from megatronapp_trainer.training.loop import Trainer
        from megatronapp_trainer.training.signals import StopRequest

        run, observer, inboxes = self._run, self._passes, inbox_sizes()
        schedule: Any
        if run.layout.role is RankRole.BACKWARD:
            iterators: Any = setup.begin_backward(run)
            publishing = Publishing(line=self._lines.append)
            schedule = setup.build_backward_schedule(run, observer, publishing, request_stop=lambda: None)
        else:
            iterators = sampled_iterators(run, run.layout)
            schedule = build_schedule(run, observer)
        trainer = Trainer(run, iterators, schedule, stop_request=StopRequest(), reporter=None)
        self._connection.send({"role": self._role, "ring_bytes": sum(inboxes)})
        commands: dict[str, Callable[..., Figures]] = {
            "passes": lambda count: self._run_passes(schedule, iterators.train, count),
            "step": lambda: self._run_step(trainer),
        }
        while (command := self._connection.recv())[0] != "end":
            self._connection.send(commands[command[0]](*command[1:]))
        schedule.close()

    def _run_passes(self, schedule: Any, feed: Iterator[Any], count: int) -> Figures:  # noqa: ANN401
        """Run all passes of a step, without the optimizer, and digest the gradients in deterministic mode."""
        from megatronapp_trainer.data.microbatches import StepFeed
        from megatronapp_trainer.models.registry import model_family

        run = self._run
        for chunk in run.state.chunks:
            chunk.zero_grad_buffer()
        source = model_family(run.config).batch_source(run.config, run.layout, run.device)
        step_feed = StepFeed(source, feed, count, observer=None)
        figures = self._timed(lambda: schedule.train(step_feed, count))
        if run.config.precision.deterministic_mode:
            figures["digest"] = gradient_digest(run.state.chunks)
        return figures

    def _run_step(self, trainer: Any) -> Figures:  # noqa: ANN401 - Trainer
        outcome: list[Any] = []
        figures = self._timed(lambda: outcome.append(trainer.step()))
        return figures | {"loss": outcome[0].loss.mean, "norm": outcome[0].grad_norm}

    def _timed(self, run: Callable[[], Any]) -> Figures:
        """Return host times of begin and end on the clock of the machine, lengths of passes, and memory."""
        device = self._device
        device.synchronize()
        device.reset_peak()
        before, begun = device.allocated(), time.monotonic()
        run()
        device.synchronize()
        times = {"begun": begun, "ended": time.monotonic()}
        self._lines[:-1] = []  # the newest is what is in force
        return {
            **times,
            **self._passes.take(),
            "log": " ".join(self._lines),
            "peak_bytes": device.peak(),
            "added_bytes": device.peak() - before,
        }


def pass_times(device: Any) -> Any:  # noqa: ANN401 - made late: a module of the bench
    """Return an observer that measures passes on a `BenchDevice`."""
    from ignored_events import IgnoredEvents

    class PassTimes(IgnoredEvents):
        """A `StepObserver` that measures forward and backward passes on the device."""

        def __init__(self) -> None:
            super().__init__()
            self.at_end: Callable[[], None] | None = None
            self._spans: list[tuple[str, Any, Any]] = []
            self._open: dict[Any, Any] = {}

        def begin(self, kind: Any, chunk: int, microbatch: int, *, early: bool = False) -> None:  # noqa: ANN401
            if kind.name in {"FORWARD", "BACKWARD", "WEIGHT"}:
                self._open[kind] = device.mark()

        def end(self, kind: Any) -> None:  # noqa: ANN401 - RecordKind
            if kind in self._open:
                self._spans.append((kind.name.lower(), self._open.pop(kind), device.mark()))

        def step_end(self, _metrics: object) -> None:
            if self.at_end is not None:
                device.synchronize()
                self.at_end()

        def take(self) -> Figures:
            """Return the median milliseconds of each kind of pass since the last call, and their sum."""
            lengths = defaultdict(list)
            for kind, begun, ended in self._spans:
                lengths[kind].append(1e3 * device.seconds(begun, ended))
            self._spans.clear()
            figures = {f"{kind}_ms": statistics.median(values) for kind, values in lengths.items()}
            return figures | {f"{kind}_sum_ms": sum(values) for kind, values in lengths.items()}

    return PassTimes()


class IssueTimer:
    """Host time that a forward rank spends on shipping: on gathering parts, and on sending them; not on recording."""

    def __init__(self) -> None:
        self._depth = 0
        self._begun = 0.0
        self._seconds = 0.0
        self._passes = 0

    def install(self) -> None:
        """Measure in the classes that ship, which this process has alone."""
        from megatronapp_trainer.fbd.channels.channel import Channel
        from megatronapp_trainer.fbd.graph.recorder import ForwardRecorder

        send_parts, recording = Channel.send_parts, ForwardRecorder.recording

        def timed_recording(recorder: Any, ship: Callable[..., None]) -> Any:  # noqa: ANN401
            self._passes += 1
            return recording(recorder, lambda *shipment: self._timed(ship, *shipment))

        def timed_send_parts(channel: Any, *rest: Any) -> None:  # noqa: ANN401
            self._timed(send_parts, channel, *rest)

        Channel.send_parts = timed_send_parts  # type: ignore[method-assign, assignment]
        ForwardRecorder.recording = timed_recording  # type: ignore[method-assign, assignment]

    def _timed(self, run: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401
        self._depth += 1
        self._begun = time.perf_counter() if self._depth == 1 else self._begun
        try:
            run(*arguments)
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._seconds += time.perf_counter() - self._begun

    def take(self) -> Figures:
        """Return the milliseconds of a pass since the last call."""
        figures = {"issue_ms": 1e3 * self._seconds / max(self._passes, 1)}
        self._seconds, self._passes = 0.0, 0
        return figures


def sampled_iterators(run: Any, layout: Any) -> Any:  # noqa: ANN401 - TrainingRun, Layout
    """Return data made once, in turns over the replicas: making it is not what is measured."""
    import torch

    from megatronapp_trainer.data.microbatches import DataIterators
    from megatronapp_trainer.data.mock_data import mock_sample

    length, vocabulary = run.config.model.seq_length, run.config.data.vocab_size
    size = run.config.training.micro_batch_size
    rows = torch.stack([mock_sample(f"bench:{index}", vocabulary, length + 1) for index in range(32)])
    positions, mask = torch.arange(length).expand(size, -1), torch.ones(size, length)

    def batches() -> Iterator[dict[str, Any]]:
        for microbatch in itertools.count(layout.data_rank, layout.data_size):
            tokens = rows[torch.arange(microbatch * size, (microbatch + 1) * size) % len(rows)]
            yield {
                "tokens": tokens[:, :-1].contiguous(),
                "labels": tokens[:, 1:].contiguous(),
                "loss_mask": mask,
                "position_ids": positions,
            }

    feed: Any = batches()
    return DataIterators(train=feed, valid=None, test=None)


def gradient_digest(chunks: list[Any]) -> str:
    """Return a digest of all gradients."""
    import torch

    digest = hashlib.sha256()
    for chunk in chunks:
        for parameter in chunk.parameters():
            digest.update(parameter.main_grad.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def inbox_sizes() -> list[int]:
    """Return a list that gets the bytes of this rank's inbox for shipments, which torch does not count."""
    from megatronapp_trainer.fbd import setup

    found: list[int] = []
    patched: Any = setup
    make_plan = patched.channel_plan

    def plan(*arguments: Any, shipment_bytes: int, shipments: int, **options: Any) -> Any:  # noqa: ANN401
        found.append(shipment_bytes * shipments)
        return make_plan(*arguments, shipment_bytes=shipment_bytes, shipments=shipments, **options)

    patched.channel_plan = plan
    return found
