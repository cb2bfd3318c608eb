"""Pure parts of the loop: batch sizes, coordinates, throughput, the log line, the progress document, spans."""

import dataclasses
import importlib.util
import pathlib
import shlex
import signal
import subprocess
import sys
import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.names import Env
from megatronapp_common.trace import NO_MICROBATCH, RecordKind
from megatronapp_trainer.config import TrainerConfig, parse
from megatronapp_trainer.config.batch_size import BatchSchedule
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.hooks.step_observer import ObserverTimers, StepMetrics
from megatronapp_trainer.parallel.layout import Layout, layout_from_environment
from megatronapp_trainer.pipeline.pass_timers import PassTimers
from megatronapp_trainer.training.metrics import (
    flops_per_token,
    flops_per_token_full_attention,
    log_line,
    peak_tflops,
    perplexity,
    why_no_mfu,
)
from megatronapp_trainer.training.progress import Reporter, open_progress
from megatronapp_trainer.training.watch.events import EventFileWriter, Events, open_events

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --train-iters 10 "
    "--lr 1e-3 --mock-data --vocab-size 128"
)


def config_of(more: str = "") -> TrainerConfig:
    return parse(shlex.split(f"{SMALL} {more}"))


@given(
    stride=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stairs=st.tuples(st.integers(1, 5), st.integers(0, 6), st.integers(1, 4)),
    samples=st.integers(1, 2000),
    consumed=st.integers(0, 3000),
)
def test_ramp_up_is_a_staircase_to_the_final_size(
    stride: tuple[int, int], stairs: tuple[int, int, int], samples: int, consumed: int
) -> None:
    (micro, replicas), (start, increments, increment) = stride, stairs
    per_microbatch = micro * replicas
    first, step = start * per_microbatch, increment * per_microbatch
    final = first + increments * step
    schedule = BatchSchedule(micro_batch_size=micro, data_size=replicas, final=final, ramp=(first, step, samples))
    size = schedule.global_batch_size(consumed)
    assert first <= size <= final
    assert (size - first) % step == 0
    assert size <= schedule.global_batch_size(consumed + 1)
    assert schedule.global_batch_size(samples + 1) == final
    assert schedule.global_batch_size(0) == first
    assert schedule.num_microbatches(consumed) * per_microbatch == size


@given(
    stairs=st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(1, 3)),
    samples=st.integers(1, 60),
    steps=st.integers(0, 80),
)
def test_samples_of_steps_are_those_that_the_steps_take(stairs: tuple[int, int, int], samples: int, steps: int) -> None:
    first, increments, increment = stairs
    final = first + increments * increment
    schedule = BatchSchedule(micro_batch_size=1, data_size=1, final=final, ramp=(first, increment, samples))
    consumed = [0]
    for _ in range(steps):
        consumed.append(consumed[-1] + schedule.global_batch_size(consumed[-1]))
    assert schedule.samples_of(steps) == consumed[-1]
    assert schedule.steps_left(consumed[-1], 0) == steps
    middle = steps // 2
    assert schedule.steps_left(consumed[-1], consumed[middle]) == steps - middle
    assert schedule.steps_left(consumed[-1] - 1, 0) == max(0, steps - 1)


def test_train_samples_are_as_many_steps_as_fit() -> None:
    samples = SMALL.replace("--train-iters 10", "--train-samples 100 --global-batch-size 8")
    assert parse(shlex.split(samples)).training.train_iters == 12
    ramp = f"{samples} --rampup-batch-size 2 2 20"
    assert parse(shlex.split(ramp)).training.train_iters == sum((4, 2, 1, 9))  # of 2, 4, 6 and 8 samples


def test_without_ramp_up_the_size_is_constant() -> None:
    schedule = BatchSchedule(micro_batch_size=2, data_size=2, final=16)
    assert {schedule.global_batch_size(consumed) for consumed in range(100)} == {16}
    assert schedule.num_microbatches(0) == 4


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_coordinates_name_every_rank_once(tensor: int, pipeline: int, data: int) -> None:
    world = tensor * pipeline * data
    layouts = [
        Layout(
            rank=rank,
            world_size=world,
            local_rank=0,
            tensor_size=tensor,
            pipeline_size=pipeline,
            virtual_size=1,
        )
        for rank in range(world)
    ]
    places = {(layout.pipeline_rank, layout.data_rank, layout.tensor_rank) for layout in layouts}
    assert places == {(p, d, t) for p in range(pipeline) for d in range(data) for t in range(tensor)}
    assert [layout.is_reporter for layout in layouts].count(True) == 1
    assert all(layout.data_size == data for layout in layouts)


def test_a_world_that_groups_do_not_divide_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(UsageError, match="multiple of 4"):
        layout_from_environment(tensor_size=2, pipeline_size=2, virtual_size=1)
    monkeypatch.setenv("WORLD_SIZE", "six")
    with pytest.raises(UsageError, match="'six'"):
        layout_from_environment(tensor_size=1, pipeline_size=1, virtual_size=1)


def test_flops_follow_the_known_formula() -> None:
    """12 L h^2 (1 + G/H + s/2h) + 12 L h f + 6 h V for plain GPT, per token; with the whole attention s/h."""
    model = config_of().model
    layers, hidden, sequence, vocab = 4, 64, 32, 128
    outside = 12 * layers * hidden * 256 + 6 * hidden * vocab
    causal = 12 * layers * hidden**2 * (1 + 1 + sequence / (2 * hidden)) + outside
    full = 12 * layers * hidden**2 * (1 + 1 + sequence / hidden) + outside
    assert flops_per_token(model, vocab) == pytest.approx(causal)
    assert flops_per_token_full_attention(model, vocab) == pytest.approx(full)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("cuda:0 NVIDIA H200", 989.4),
        ("cuda:3 NVIDIA H100 80GB HBM3", 989.4),
        ("cuda:0 NVIDIA H100 PCIe", 756.0),
        ("cuda:0 NVIDIA H100 NVL", 835.0),
        ("cuda:0 NVIDIA A100-SXM4-80GB", 312.0),
        ("cuda:0 NVIDIA GH200 480GB", 989.4),
        ("cuda:0 NVIDIA B200", 2250.0),
        ("cuda:0 NVIDIA L40S", 362.1),
        ("cuda:0 NVIDIA L4", 121.0),
        ("cuda:0 NVIDIA A10G", None),
        ("cuda:0 NVIDIA GeForce RTX 4090", None),
        ("cuda:0 NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("cuda:0 NVIDIA A100-SXM4-40GB MIG 7g.40gb", None),
        ("cpu", None),
    ],
)
def test_peaks_are_known_by_the_name_of_the_device(name: str, peak: float | None) -> None:
    assert peak_tflops(name, is_half=True) == peak
    assert peak_tflops(name, is_half=False) is None


@pytest.mark.parametrize(
    ("name", "is_half", "message"),
    [
        ("cuda:0 NVIDIA H100 80GB HBM3 MIG 1g.10gb", True, "is a MIG slice"),
        ("cuda:0 NVIDIA GeForce RTX 4090", True, "the peak of cuda:0 NVIDIA GeForce RTX 4090 is not known"),
        ("cuda:0 NVIDIA H200", True, None),
        ("cuda:0 NVIDIA H100 80GB HBM3 MIG 1g.10gb", False, None),
        ("cpu", True, None),
    ],
)
def test_a_missing_mfu_has_a_reason(name: str, is_half: bool, message: str | None) -> None:
    reason = why_no_mfu(name, is_half=is_half)
    assert reason is None if message is None else message in (reason or "")


def test_the_log_line_has_the_mfu_where_the_peak_is_known() -> None:
    known, unknown = (
        log_line(
            dataclasses.replace(metrics_of(1, 2.0), tflops_per_gpu=346.2, mfu=mfu),
            train_iters=10,
            elapsed_s=0.1,
            batch_size=8,
            skipped=0,
            seconds_left=1.0,
        )
        for mfu in (0.35, None)
    )
    assert "throughput per GPU (TFLOP/s/GPU): 346.2 | MFU: 35.0 % |" in known
    assert "MFU" not in unknown


def test_perplexity_is_bounded() -> None:
    assert perplexity(0.0) == 1.0
    assert perplexity(100.0) == perplexity(20.0)


def metrics_of(iteration: int, loss: float) -> StepMetrics:
    return StepMetrics(
        iteration=iteration,
        loss=loss,
        learning_rate=1e-3,
        grad_norm=None,
        tokens_per_second=1000.0,
        tflops_per_gpu=0.5,
        mfu=None,
        consumed_samples=16 * iteration,
        skipped=False,
    )


def test_log_lines_hold_means_over_the_interval() -> None:
    lines: list[str] = []
    reporter = Reporter(config_of("--log-interval 2"), progress=None, events=None, print_line=lines.append)
    for iteration, (loss, elapsed_s) in enumerate([(4.0, 0.1), (2.0, 0.3), (1.0, 0.2)], start=1):
        reporter.step(metrics_of(iteration, loss), elapsed_s=elapsed_s, batch_size=16, skipped_steps=0)
    (line,) = lines
    assert "iteration        2/      10 |" in line
    assert "lm loss: 3.000000E+00 |" in line
    assert "elapsed time per iteration (ms): 200.0 |" in line
    assert "tokens per second: 1500 |" in line
    assert "time left: 0:00:02 |" in line


class Samples:
    """Fake of TensorBoard's writer."""

    def __init__(self) -> None:
        self.samples: list[tuple[str, float, int]] = []
        self.closed = False

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.samples.append((tag, value, step))

    def close(self) -> None:
        self.closed = True


def test_events_are_written_at_their_interval() -> None:
    events, lines = Samples(), list[str]()
    config = config_of("--tensorboard-log-interval 2 --log-interval 100")
    reporter = Reporter(
        config, progress=None, events=Events({"/events": EventFileWriter(events)}), print_line=lines.append
    )
    for iteration in range(1, 5):
        reporter.step(metrics_of(iteration, 2.0), elapsed_s=0.1, batch_size=16, skipped_steps=0)
    reporter.validation(4, 0.0, "validation")
    reporter.close()
    assert [sample for sample in events.samples if sample[0] == "lm loss"] == [("lm loss", 2.0, 2), ("lm loss", 2.0, 4)]
    assert ("lm loss validation ppl", 1.0, 4) in events.samples
    assert "grad-norm" not in {tag for tag, _, _ in events.samples}
    assert events.closed
    assert "validation loss at iteration 4 | lm loss value: 0.000000E+00" in lines[0]


class FullDisk(Samples):
    """A writer whose disk is full from the second sample on."""

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        if self.samples:
            raise OSError(28, "No space left on device")
        super().add_scalar(tag, value, step)

    def close(self) -> None:
        raise OSError(28, "No space left on device")


def test_an_error_of_the_event_file_ends_the_file_and_not_the_training(caplog: pytest.LogCaptureFixture) -> None:
    events, others = FullDisk(), Samples()
    writers = Events({"/events": EventFileWriter(events), "others": EventFileWriter(others)})
    reporter = Reporter(config_of(""), progress=None, events=writers, print_line=lambda _: None)
    for iteration in range(1, 4):
        reporter.step(metrics_of(iteration, 2.0), elapsed_s=0.1, batch_size=16, skipped_steps=0)
    reporter.validation(3, 1.0, "validation")
    reporter.close()
    assert len(events.samples) == 1
    assert [step for tag, _, step in others.samples if tag == "lm loss"] == [1, 2, 3]
    assert others.closed
    assert caplog.text.count("no more events are written to /events: [Errno 28] No space left on device") == 1


def test_an_event_folder_that_cannot_be_written_is_refused_at_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()

    found: list[int] = []

    def writer(directory: str, *, max_queue: int) -> None:
        found.append(max_queue)
        pathlib.Path(directory).mkdir(parents=True)

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=writer))
    with pytest.raises(UsageError, match=r"--tensorboard-dir .*file/events cannot be written to"):
        open_events(config_of(f"--tensorboard-dir {file / 'events'} --tensorboard-queue-size 5"))
    assert found == [5]


def test_no_progress_document_without_a_worker_and_a_warning_without_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(Env.SHM_PREFIX, raising=False)
    assert open_progress(10) is None
    monkeypatch.setenv(Env.SHM_PREFIX, "job")
    monkeypatch.setenv(Env.SHM_DIR, "/nonexistent")
    assert open_progress(10) is None
    assert "no progress is published" in caplog.text


class Spans:
    """Observer that stores the spans it receives."""

    def __init__(self) -> None:
        self.events: list[tuple[str, RecordKind, int, int]] = []

    def begin(self, kind: RecordKind, chunk: int, microbatch: int, *, early: bool = False) -> None:
        self.events.append(("begin", kind, chunk, microbatch))

    def end(self, kind: RecordKind) -> None:
        self.events.append(("end", kind, -1, -1))


def test_timers_name_chunk_and_microbatch_of_backward_passes() -> None:
    spans: Any = Spans()
    timers = PassTimers(spans, ObserverTimers(spans))
    timers.begin_step(((1, 0), (0, 0)))
    timers("forward-compute", log_level=2).start()
    timers.begin_forward(1, 7)
    timers("forward-compute").stop()
    for _ in range(2):
        timers("backward-compute", log_level=2).start()
        timers("backward-compute").stop()
    timers("all-grads-sync", log_level=1).start(barrier=False)
    timers("all-grads-sync").stop()
    timers("forward-recv", log_level=2).start()
    timers("forward-recv").stop()
    assert [event for event in spans.events if event[0] == "begin"] == [
        ("begin", RecordKind.FORWARD, 1, 7),
        ("begin", RecordKind.BACKWARD, 1, 0),
        ("begin", RecordKind.BACKWARD, 0, 0),
        ("begin", RecordKind.GRAD_REDUCE, 0, NO_MICROBATCH),
    ]
    assert len(spans.events) == 8


def test_the_configuration_needs_no_torch() -> None:
    """Refusing a flag must not cost the import of torch."""
    code = (
        "import sys; from megatronapp_trainer.pretrain import main; "
        "assert main(['--nonsense']) == 64; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_megatron_core_is_imported_after_the_device_is_chosen() -> None:
    """On a CPU the import of its fused functions would compile them."""
    code = (
        "import sys, megatronapp_trainer.training.build, megatronapp_trainer.training.loop; "
        "sys.exit('megatron.core' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("main", "seen"), [("lambda: 70", 70), ("lambda: 0", -signal.SIGABRT), ("lambda: 1 / 0", 1)])
def test_an_exit_code_of_an_error_outlives_threads_that_abort_at_the_end(main: str, seen: int) -> None:
    program = (
        "import atexit, os; from megatronapp_trainer.utils.process_exit import exit_with; "
        f"atexit.register(os.abort); print('last words', end=''); exit_with({main})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (seen, "last words"), done.stderr


@given(seed=st.integers(0, 1000), vocab_size=st.sampled_from([1, 2, 100, 50_257, 200_000]), length=st.integers(1, 300))
def test_mock_tokens_follow_from_those_before(seed: int, vocab_size: int, length: int) -> None:
    """Three of four tokens are 3 t + 1 after t; what is drawn for the others, and which they are, has not changed."""
    import torch

    from megatronapp_trainer.data.mock_data import mock_sample
    from megatronapp_trainer.utils.keyed_generator import generator_of

    generator = generator_of(str(seed))
    free = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
    follows = (torch.rand(length, generator=generator) < 0.75).tolist()
    expected = free[:1]
    for place in range(1, length):
        expected.append((expected[-1] * 3 + 1) % vocab_size if follows[place] else free[place])
    assert mock_sample(str(seed), vocab_size, length).tolist() == expected


def test_mock_samples_do_not_depend_on_the_layout() -> None:
    from megatronapp_trainer.data.mock_data import mock_batches

    config = config_of("--micro-batch-size 2")

    def first_samples(data_size: int, steps: int) -> list[list[int]]:
        rows: list[list[int]] = []
        streams = [
            mock_batches(
                config,
                Layout(rank=rank, world_size=data_size, local_rank=0, tensor_size=1, pipeline_size=1, virtual_size=1),
                split=0,
                first_sample=4,
            )
            for rank in range(data_size)
        ]
        for _ in range(steps):
            for stream in streams:
                rows += next(stream)["tokens"].tolist()
        return rows

    assert first_samples(1, 6) == first_samples(2, 3) == first_samples(3, 2)


def test_shards_of_initial_weights_make_up_the_whole() -> None:
    import torch

    from megatronapp_trainer.models.initial import initial_shard

    model = config_of("--swiglu --ffn-hidden-size 64").model

    def shard(name: str, shape: tuple[int, ...], axis: int, size: int, rank: int) -> torch.Tensor:
        parameter: Any = torch.nn.Parameter(torch.empty(shape))
        parameter.tensor_model_parallel, parameter.partition_dim = True, axis
        layout = Layout(rank=rank, world_size=size, local_rank=0, tensor_size=size, pipeline_size=1, virtual_size=1)
        return initial_shard(name, parameter, model, seed=1, layout=layout)

    rows = "decoder.layers.3.self_attention.linear_qkv.weight"
    whole = shard(rows, (12, 8), 0, 1, 0)
    assert torch.equal(whole, torch.cat([shard(rows, (6, 8), 0, 2, rank) for rank in range(2)]))
    gated = "decoder.layers.3.mlp.linear_fc1.weight"
    gate, up = shard(gated, (8, 4), 0, 1, 0).chunk(2)
    first = shard(gated, (4, 4), 0, 2, 0)
    assert torch.equal(first, torch.cat([gate[:2], up[:2]]))
    narrow = shard("decoder.layers.3.mlp.linear_fc2.weight", (64, 64), 1, 1, 0)
    assert narrow.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.1)
    assert torch.equal(shard("decoder.layers.0.input_layernorm.weight", (4,), 0, 1, 0), torch.ones(4))


def test_transformer_engine_is_refused_where_it_is_missing() -> None:
    from megatronapp_trainer.models.layers import resolve_implementation

    assert resolve_implementation(config_of("--transformer-impl local").model) == "local"
    if importlib.util.find_spec("transformer_engine") is None:
        assert resolve_implementation(config_of().model) == "torch"
        with pytest.raises(UsageError, match="is not installed"):
            resolve_implementation(config_of("--transformer-impl transformer_engine").model)


def test_second_interrupt_does_not_wait() -> None:
    import signal

    from megatronapp_trainer.training.signals import StopRequest

    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop_request:
        signal.raise_signal(signal.SIGTERM)
        assert stop_request.requested
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before
