"""Entry point of ``python -m megatronapp_trainer.pretrain``: one rank of a training run. Exit codes:
``names.ExitCode``.
"""

import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatronapp_common.names import ExitCode
from megatronapp_common.topology import RankRole
from megatronapp_trainer.config import TrainerConfig, build_parser, parse
from megatronapp_trainer.config.batch_size import with_steps
from megatronapp_trainer.errors import CheckpointError, PeerLostError, RendezvousError, TrainerError
from megatronapp_trainer.utils.process_exit import exit_with
from megatronapp_trainer.utils.quick_imports import imports_without_collections

if TYPE_CHECKING:
    from megatronapp_trainer.data.microbatches import DataIterators
    from megatronapp_trainer.device import Device
    from megatronapp_trainer.hooks.boundary_control import BoundaryControl
    from megatronapp_trainer.hooks.probe_texts import ProbeTexts
    from megatronapp_trainer.hooks.scheduled_capture import ScheduledCapture
    from megatronapp_trainer.hooks.step_observer import StepObserver
    from megatronapp_trainer.hooks.training_capture import TrainingCapture
    from megatronapp_trainer.hooks.training_perturbation import TrainingPerturbation
    from megatronapp_trainer.parallel.layout import Layout
    from megatronapp_trainer.pipeline.schedule import PipelineSchedule
    from megatronapp_trainer.training.build import TrainingRun
    from megatronapp_trainer.training.progress import Reporter
    from megatronapp_trainer.training.signals import StopRequest


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; returns the exit code. Errors of the trainer become one message on stderr."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        build_parser().print_help()
        return ExitCode.OK
    log_to_stderr()
    try:
        return pretrain(parse(arguments))
    except TrainerError as error:
        rank = os.environ.get("RANK", "0")
        print(f"error (rank {rank}): {error}", file=sys.stderr, flush=True)
        return error.exit_code


def log_to_stderr() -> None:
    """Write warnings to stderr, which is in the log of the rank, and of the trainer's own modules notes as well."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("megatronapp_trainer").setLevel(logging.INFO)


def pretrain(config: TrainerConfig) -> ExitCode:
    """Set up, train, evaluate, and tear down. Raises TrainerError."""
    with imports_without_collections():
        from megatronapp_trainer.device import prepare_device
        from megatronapp_trainer.parallel.groups import destroy_groups, initialize_groups
        from megatronapp_trainer.parallel.seeds import apply_deterministic_mode
        from megatronapp_trainer.training.build import layout_of
        from megatronapp_trainer.training.signals import StopRequest

        layout = layout_of(config)
    with StopRequest() as stop_request, named_errors():
        apply_deterministic_mode(config)
        with imports_without_collections():  # on a CPU, of most of megatron-core
            device = prepare_device(layout.gpu_place(config.fbd), config.parallel.ranks_per_gpu)
        if config.logging.trace_nccl:
            from megatronapp_trainer.scan.nccl_transfers import choose_plugin

            choose_plugin(is_cuda=device.is_cuda)
        initialize_groups(config, layout, device)
        if config.dpp.use_dpp and not config.fbd.enabled:  # MegaFBD compares the memory of its own messages
            from megatronapp_trainer.pipeline.dynamic import check_memory

            check_memory(config, layout)
        if config.dpp.replaces_transfers:
            from megatronapp_trainer.pipeline.transport.stage_transport import check_stage_memory

            check_stage_memory(config, layout)
        run = _run_forward if layout.role is RankRole.FORWARD else _train
        code = run(config, layout, device, stop_request)
        destroy_groups()
    return code


def _train(config: TrainerConfig, layout: "Layout", device: "Device", stop_request: "StopRequest") -> ExitCode:
    from megatronapp_trainer.training.build import build_run, vocab_size_of, with_overlap
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.progress import make_reporter

    config = with_overlap(config, layout, device)
    reporter = make_reporter(config, layout)
    if reporter is not None:
        reporter.state("starting")
    checkpoints = _checkpoint_manager(config, layout)
    loads = checkpoints is not None and checkpoints.finds_checkpoint()
    run = build_run(config, layout, device, vocab_size=vocab_size_of(config), drawn=not loads)
    if checkpoints is not None and not checkpoints.load(run.state) and loads:
        raise CheckpointError("the checkpoint was removed while this run started; start it again")
    done = run.state
    config = with_steps(config, iteration=done.iteration, consumed_samples=done.consumed_samples)
    run = dataclasses.replace(run, config=config)
    if reporter is not None and done.iteration:
        reporter.resumed(done.iteration, done.consumed_samples, total_iterations=config.training.train_iters)
    with contextlib.ExitStack() as stack:
        observer = open_observer(run)
        for part in (checkpoints, reporter, observer):
            if part is not None:
                stack.callback(part.close)
        saves_to = checkpoints if config.checkpoint.save is not None else None
        iterators, schedule, announce = _data_and_schedule(run, observer, reporter, stop_request)
        capture = prepare_capture(run)
        perturbation = prepare_perturbation(run, schedule)
        control = open_control(
            run,
            observer,
            stop_request,
            announce=announce,
            reporter=reporter,
            capture=capture,
            perturbation=perturbation,
        )
        if capture is not None:
            capture.begin()
            stack.callback(capture.close)
        trainer = Trainer(
            run,
            iterators,
            schedule,
            stop_request=stop_request,
            reporter=reporter,
            checkpoints=saves_to,
            observer=observer,
            control=control,
            capture=capture,
            probes=prepare_texts(run, capture),
            perturbation=perturbation,
        )
        code = ExitCode.OK if config.logging.skip_train else trainer.train()
        if config.logging.skip_train or run.state.iteration >= config.training.train_iters:
            code = trainer.test()
        if control is not None:
            control.close()
        schedule.close(code)
    return code


def _data_and_schedule(
    run: "TrainingRun",
    observer: "StepObserver | None",
    reporter: "Reporter | None",
    stop_request: "StopRequest",
) -> "tuple[DataIterators, PipelineSchedule, Callable[[], None] | None]":
    """Open the data and create the schedule; a backward rank of MegaFBD has its data on forward ranks, and calls them
    to step boundaries by the third value.
    """
    from megatronapp_trainer.training.build import build_iterators, build_schedule

    report = None if reporter is None else reporter.line
    if run.layout.role is RankRole.BACKWARD:
        from megatronapp_trainer.fbd.setup import begin_backward, build_backward_schedule
        from megatronapp_trainer.fbd.tuning.ship_tuner import Publishing

        publishing = Publishing(line=report, report=None if reporter is None else reporter.forward_backward)
        remote = begin_backward(run)
        backward = build_backward_schedule(run, observer, publishing, request_stop=stop_request.request)
        return remote, backward, backward.announce_boundary
    done = run.state
    iterators = build_iterators(
        run.config,
        run.layout,
        done.consumed_samples,
        order_samples=done.order_samples,
        stream_state=done.stream_state,
    )
    publish_plan = None if reporter is None else reporter.plan
    return iterators, build_schedule(run, observer, report=report, publish_plan=publish_plan), None


def _run_forward(config: TrainerConfig, layout: "Layout", device: "Device", stop_request: "StopRequest") -> ExitCode:
    """Run a forward rank of MegaFBD until its backward ranks end the training."""
    from megatronapp_trainer.fbd.commanded_perturbation import CommandedPerturbation
    from megatronapp_trainer.fbd.setup import build_forward_rank
    from megatronapp_trainer.training.build import build_run, vocab_size_of

    config = config.of_role(layout.role)
    run = build_run(config, layout, device, vocab_size=vocab_size_of(config), drawn=False)
    capture = prepare_capture(run)
    perturbation = CommandedPerturbation()
    forward = build_forward_rank(
        run,
        open_observer,
        stop_requested=lambda: stop_request.requested,
        open_control=lambda observer: open_control(
            run, observer, stop_request, capture=capture, perturbation=perturbation
        ),
        capture=capture,
        probes=prepare_texts(run, capture),
        perturbation=perturbation,
    )
    with contextlib.closing(forward):
        return forward.serve()


def _checkpoint_manager(config: TrainerConfig, layout: "Layout") -> Any | None:  # noqa: ANN401 - not imported in vain
    """Create the checkpoint manager, or return None if nothing is saved or loaded."""
    if config.checkpoint.save is None and config.checkpoint.load is None:
        return None
    from megatronapp_trainer.checkpoint.manager import CheckpointManager

    return CheckpointManager(config, layout)


def open_observer(run: "TrainingRun") -> Any | None:  # noqa: ANN401 - StepObserver, not imported where there is none
    """Create the tracer with ``--trace``; None, and nothing imported, without; collective."""
    if not run.config.logging.trace:
        return None
    from megatronapp_trainer import scan
    from megatronapp_trainer.scan.run_context import RunContext

    context = RunContext(
        config=run.config,
        layout=run.layout,
        device_name=run.device.name,
        chunks=run.state.chunks,
        num_microbatches=run.batches.num_microbatches(run.state.consumed_samples),
    )
    return scan.start(context)


def open_control(
    run: "TrainingRun",
    observer: "StepObserver | None",
    stop_request: "StopRequest",
    *,
    announce: "Callable[[], None] | None" = None,
    reporter: "Reporter | None" = None,
    capture: "TrainingCapture | None" = None,
    perturbation: "TrainingPerturbation | None" = None,
) -> "BoundaryControl | None":
    """Connect this rank to the control of the training with ``--training-control``; None, and nothing imported,
    without; collective over all ranks of the job.

    `announce` calls the forward ranks to a step boundary; `reporter` shows the state; `capture` and `perturbation` obey
    orders, too.
    """
    if not run.config.control.enabled:
        return None
    from megatronapp_trainer.training.control import setup

    surroundings = setup.RankSurroundings(
        run.device,
        stop_requested=lambda: stop_request.requested,
        announce=announce,
        publish=None if reporter is None else reporter.control,
    )
    return setup.open_control(
        run.config, run.layout, surroundings, observer, capture=capture, perturbation=perturbation
    )


def prepare_perturbation(run: "TrainingRun", schedule: "PipelineSchedule") -> "TrainingPerturbation | None":
    """Prepare to perturb steps with ``--training-control``; None without. `schedule`: runs the passes."""
    config, layout = run.config, run.layout
    if not config.control.enabled:
        return None
    from megatronapp_trainer.pipeline.planning.orders import interleaved, peak_in_flight
    from megatronapp_trainer.pipeline.planning.tasks import Placement
    from megatronapp_trainer.training.build import vocab_size_of
    from megatronapp_trainer.training.perturbation.setup import open_perturbation

    def peak(weights: Sequence[int]) -> int:
        microbatches = config.most_microbatches(layout.trained_data_size)
        placement = Placement(layout.pipeline_size, layout.virtual_size)
        return peak_in_flight(interleaved(placement, microbatches, layout.pipeline_rank), tuple(weights))

    weights_changed: Callable[[], None] = lambda: None  # noqa: E731 - the default
    if config.fbd.enabled:
        from megatronapp_trainer.fbd.backward_schedule import BackwardSchedule

        assert isinstance(schedule, BackwardSchedule)
        weights_changed = schedule.resend_weights

    return open_perturbation(
        config,
        layout,
        run.state,
        vocabulary=vocab_size_of(config),
        device=run.device,
        peak=peak,
        weights_changed=weights_changed,
    )


def prepare_capture(run: "TrainingRun") -> "ScheduledCapture | None":
    """Prepare to capture steps with ``--scope-capture-interval`` or ``--training-control``; None without.

    Nothing of it is imported before a step is captured.
    """
    if run.config.control.scope_capture_interval is None and not run.config.control.enabled:
        return None
    from megatronapp_trainer.hooks.scheduled_capture import ConnectedCapture, ScheduledCapture

    def connect(every: int) -> ConnectedCapture:
        from megatronapp_trainer.scope.statistics import setup

        return setup.open_capture(
            run.config,
            run.layout,
            run.state.chunks,
            run.device.torch_device,
            every=every,
            loss_scale=lambda: float(run.state.optimizer.get_loss_scale()) if run.config.precision.fp16 else 1.0,
        )

    return ScheduledCapture(connect, every=run.config.control.scope_capture_interval or 0)


def prepare_texts(run: "TrainingRun", capture: "ScheduledCapture | None") -> "ProbeTexts | None":
    """Prepare to run the texts of ``--scope-probe-texts``; None, and nothing imported, without. Raises UsageError."""
    if run.config.control.scope_probe_texts is None or capture is None:
        return None
    from megatronapp_trainer.scope.texts import setup

    config, layout = run.config, run.layout
    rounds = setup.rounds_of(config, layout, run.batches)
    if layout.role is RankRole.BACKWARD:
        from megatronapp_trainer.fbd.remote_texts import RemoteTexts

        return RemoteTexts(rounds.microbatches, rounds.rounds)
    from megatronapp_trainer.training.build import vocab_size_of

    return setup.open_texts(
        config,
        layout,
        run.state.chunks,
        run.core_config,
        rounds=rounds,
        vocab_size=vocab_size_of(config),
        device=run.device.torch_device,
        send=capture.post,
    )


@contextlib.contextmanager
def named_errors() -> Iterator[None]:
    """Convert torch's errors about peers and ports to errors of the trainer."""
    from megatronapp_trainer.parallel.agreement import is_peer_lost_error, is_port_in_use_error

    try:
        yield
    except RuntimeError as error:
        if is_port_in_use_error(error):
            raise RendezvousError(
                f"port {os.environ.get('MASTER_PORT')} is in use, so that rank 0 cannot listen there for the others; "
                "stop what uses it, or start again with another MASTER_PORT (the launcher chooses one by itself)"
            ) from error
        if is_peer_lost_error(error):
            raise PeerLostError(f"a peer was lost: {error}") from error
        raise


if __name__ == "__main__":
    exit_with(main)
