"""One rank of a server: load, join the gang, then generate (rank 0) or follow. Exit codes: `names.ExitCode`."""

import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatronapp_common.names import Env, ExitCode
from megatronapp_common.scope.protocol_requests import MAX_PROMPTS, MAX_TOKENS
from megatronapp_common.web.loopback import authority
from megatronapp_common.web.tokens import read_secret
from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.data.text_tokens import read_text_tokens
from megatronapp_trainer.errors import TrainerError, UsageError
from megatronapp_trainer.serve.settings import (
    ServeCommand,
    build_serve_parser,
    configure,
    newest_arguments,
    read_command,
)

if TYPE_CHECKING:
    from fastapi import FastAPI

    from megatronapp_trainer.inference.engine import Engine
    from megatronapp_trainer.inference.errors import EngineLostError, GenerationError
    from megatronapp_trainer.inference.worker_group import WorkerGroup
    from megatronapp_trainer.scope.assemble import RankScope
    from megatronapp_trainer.serve.request_broker import RequestBroker
    from megatronapp_trainer.serve.served_model import ServedModel
    from megatronapp_trainer.training.progress import ProgressWriter
    from megatronapp_trainer.training.signals import StopRequest

IDLE_S = 0.2
"""Seconds for which the engine's thread sleeps without work; a signal is handled after at most this time."""
REPORT_S = 1.0
"""Time between two writes of the progress document."""
ADDRESS_FILE = "serve.url"


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve; returns the exit code. Errors of the trainer become one message on stderr."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        build_serve_parser().print_help()
        return ExitCode.OK
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        command = read_command(arguments)
        return serve(command, configure(command))
    except TrainerError as error:
        rank = os.environ.get("RANK", "0")
        print(f"error (rank {rank}): {error}", file=sys.stderr, flush=True)
        return error.exit_code


def serve(command: ServeCommand, config: TrainerConfig) -> ExitCode:
    """Load, generate until asked to stop, tear down. Raises TrainerError."""
    from megatronapp_trainer.inference.build import generation_layout
    from megatronapp_trainer.inference.gc_freeze import freeze_gc
    from megatronapp_trainer.parallel.groups import destroy_groups
    from megatronapp_trainer.parallel.peer_loss import PeerLossListener
    from megatronapp_trainer.pretrain import named_errors
    from megatronapp_trainer.training.signals import StopRequest

    layout = generation_layout(config)
    _load_plugins(command)
    with StopRequest() as stop_request, named_errors(), contextlib.ExitStack() as stack:
        front = stack.enter_context(open_front(command, stop_request)) if layout.rank == 0 else None
        stack.enter_context(PeerLossListener(_no_broker if front is None else front.on_rank_lost))
        gang = load(command, config)
        open_capture = functools.partial(start_scope, gang, stack, published_of(command, config))
        if front is None:
            open_capture()
            freeze_gc()
            gang.follow()
        else:
            front.answer(gang, config, stop_request, open_capture)
        destroy_groups()
    return ExitCode.PREEMPTED


def _load_plugins(command: ServeCommand) -> None:
    """Import the plugins of users before any long work begins. Raises UsageError."""
    if modules := command.options.scope_plugins:
        from megatronapp_trainer.scope.plugins import load_plugins

        print(f"sites of {', '.join(modules)}: {', '.join(load_plugins(modules))}", flush=True)


def _no_broker() -> None:
    """Do nothing: followers have no broker."""


def load(command: ServeCommand, config: TrainerConfig) -> "WorkerGroup":
    """Load the model, and connect this rank to the gang. Collective."""
    from megatronapp_trainer.device import prepare_device
    from megatronapp_trainer.inference import build
    from megatronapp_trainer.inference.model_runner import RunnerOptions
    from megatronapp_trainer.parallel.groups import initialize_groups

    layout = build.generation_layout(config)
    device = prepare_device(layout.local_rank, config.parallel.ranks_per_gpu)
    initialize_groups(config, layout, device)
    vocab_size = config.data.vocab_size
    assert vocab_size is not None  # of the checkpoint's arguments
    model = build.build_model(config, layout, device, vocab_size=vocab_size, drawn=False)
    path = build.load_weights(model, config, command.load)
    options = RunnerOptions(
        slots=command.options.max_batch_size,
        capacity=capacity_of(command, config),
        prefill_chunk=command.options.prefill_chunk,
    )
    gang = build.open_worker_group(model, config, layout, device, options, vocab_size=vocab_size)
    if layout.rank == 0:
        print(f"weights read from {path}", flush=True)
    return gang


def start_scope(gang: "WorkerGroup", stack: contextlib.ExitStack, published: Mapping[str, Any]) -> "RankScope | None":
    """Start MegaScope of this rank, until the stack ends; None, and nothing loaded, without a hub."""
    folder = os.environ.get(Env.RUN_DIR)
    if not os.environ.get(Env.HUB_URL) or not folder:
        return None
    from megatronapp_trainer.scope.assemble import open_scope

    scope = open_scope(gang, pathlib.Path(folder), attempt=int(os.environ.get(Env.ATTEMPT, "0")), **published)
    stack.callback(scope.close)
    return scope


def published_of(command: ServeCommand, config: TrainerConfig) -> dict[str, Any]:
    """Return what rank 0 publishes of this server: limits of runs, and recipes that requests can name."""
    from megatronapp_trainer.serve.perturbation.named_recipes import read_perturbations

    recipes = read_perturbations(command.options.scope_perturbations)
    return {"limits": limits_of(command, config), "perturbations": recipes.listed()}


def limits_of(command: ServeCommand, config: TrainerConfig) -> dict[str, int]:
    """Return the limits of a run's prompts, and of the new tokens of each, on this server."""
    options = command.options
    return {
        "prompts": min(MAX_PROMPTS, options.max_batch_size),
        "tokens": min(MAX_TOKENS, options.max_tokens, capacity_of(command, config) - 1),
    }


def capacity_of(command: ServeCommand, config: TrainerConfig) -> int:
    """Return the limit of the tokens of a prompt and the answer together."""
    return command.options.max_length or config.model.positions


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpFrontend:
    """Rank 0's HTTP side, which users see."""

    command: ServeCommand
    app: "FastAPI"
    broker: "RequestBroker"
    url: str
    progress: "ProgressWriter | None"

    def answer(
        self,
        gang: "WorkerGroup",
        config: TrainerConfig,
        stop_request: "StopRequest",
        open_capture: "Callable[[], RankScope | None]",
    ) -> None:
        """Generate until asked to stop. `open_capture` starts reports to a hub. Raises EngineLostError."""
        from megatronapp_trainer.inference.engine import Engine
        from megatronapp_trainer.inference.gc_freeze import freeze_gc
        from megatronapp_trainer.serve.errors import StoppingError
        from megatronapp_trainer.serve.request_broker import MOST_PROBED

        model = describe(self.command, config)
        engine = Engine(
            gang,
            decode=model.decode,
            decode_plain=model.decode_plain,
            end_tokens=model.end_tokens,
            most_waiting=_most_open(self.command) + MOST_PROBED,
            admitted=self.broker.statistics.admitted,
        )
        if model.chat.flaw is not None:
            print(f"messages are refused: the model's chat template cannot be used: {model.chat.flaw}", flush=True)
        if model.tokenizer is not None:
            gang.runner.perturbation.encode = model.ids_of
        model = with_sources(model, gang)
        check_recipes(gang, model)
        engine.warm_up()
        self._open(engine, model, open_capture)
        freeze_gc()
        print(f"serving {model.name} at {self.url}", flush=True)
        self._work(engine, stop_request)
        if engine.failure is not None:
            self.broker.close(engine.failure)
            raise _blamed(engine.failure)
        self.broker.close(StoppingError("the server was asked to stop"))
        engine.close()

    def on_rank_lost(self) -> None:
        """Report the loss of a rank to all waiting clients. Not in the thread of the engine, which may hang."""
        from megatronapp_trainer.inference.errors import EngineLostError

        self.broker.close(EngineLostError("a rank of the gang was lost; the gang must be started again"))

    def _open(self, engine: "Engine", model: "ServedModel", open_capture: "Callable[[], RankScope | None]") -> None:
        """Accept requests from now on. A page offers to generate once the hub has a report of rank 0, so not before."""
        with self.app.state.opening:
            if (scope := open_capture()) is not None:
                self._start_capture(engine, scope)
            self.broker.open(engine)
            self.app.state.model = model

    def _start_capture(self, engine: "Engine", scope: "RankScope") -> None:
        from megatronapp_trainer.scope.analysis.analysis_service import AnalysisService
        from megatronapp_trainer.scope.comparison.comparison_service import ComparisonService
        from megatronapp_trainer.scope.coordinator import CaptureCoordinator
        from megatronapp_trainer.serve.scope.capture_controller import CaptureController
        from megatronapp_trainer.serve.scope.comparisons import ComparisonStore
        from megatronapp_trainer.serve.scope.sweeps import SweepStore

        captures = CaptureController(CaptureCoordinator(engine, scope.capture, scope.publisher.post), engine.defer)
        self.app.state.runs.captures = captures
        self.app.state.runs.analyses = AnalysisService(engine, scope.analyzer)
        comparisons = ComparisonService(engine, scope.comparer)
        self.app.state.runs.comparisons = ComparisonStore(comparisons, self.broker)
        self.app.state.runs.sweeps = SweepStore(comparisons, self.broker)
        self.broker.observers.append(captures.observe)

    def _work(self, engine: "Engine", stop_request: "StopRequest") -> None:
        due = 0.0
        while not stop_request.requested and engine.failure is None:
            self.broker.step(IDLE_S)
            if time.monotonic() >= due:
                self._report()
                due = time.monotonic() + REPORT_S

    def _report(self) -> None:
        statistics = self.broker.statistics
        if self.progress is not None:
            self.progress.update(
                state="serving",
                iteration=statistics.prompts,
                tokensPerSecond=statistics.tokens_per_second(),
            )


def with_sources(model: "ServedModel", gang: "WorkerGroup") -> "ServedModel":
    """Return the model with recipes whose sources are tokenized for the engine in the threads of requests."""
    perturbations = dataclasses.replace(model.perturbations, prepare=gang.runner.perturbation.sources)
    return dataclasses.replace(model, perturbations=perturbations)


def check_recipes(gang: "WorkerGroup", model: "ServedModel") -> None:
    """Raise UsageError for a recipe of the command line that this model cannot be perturbed by."""
    from megatronapp_common.scope.perturbation.recipe import RecipeError
    from megatronapp_trainer.serve.perturbation.named_recipes import FLAG

    for named in model.perturbations.recipes:
        try:
            gang.runner.perturbation.check(named.recipe)
        except RecipeError as error:
            raise UsageError(f"{FLAG}, recipe {named.name}: {error}") from error


def _blamed(failure: "EngineLostError") -> "GenerationError":
    """Return the failure with the exit code of its cause: a peer, or this rank itself."""
    from megatronapp_trainer.inference.errors import GenerationError
    from megatronapp_trainer.parallel.agreement import is_peer_lost_error

    cause = failure.__cause__
    return failure if cause is None or is_peer_lost_error(cause) else GenerationError(str(failure))


@contextlib.contextmanager
def open_front(command: ServeCommand, stop_request: "StopRequest") -> Iterator[HttpFrontend]:
    """Listen and answer that the model is being loaded. Raises UsageError, RendezvousError."""
    from megatronapp_trainer.serve import app as web
    from megatronapp_trainer.serve.request_broker import RequestBroker
    from megatronapp_trainer.serve.statistics import ServerStatistics
    from megatronapp_trainer.training.progress import open_progress

    secret = load_secret()
    place, requested_port = address_of(command)
    web.check_address(place, secret)
    progress = open_progress(0)
    if progress is not None:
        progress.update(state="starting", totalIterations=None)
    sock = web.listen(place, requested_port, reserved=bool(os.environ.get(Env.SERVE_ADDRESS)))
    url = f"http://{authority(*sock.getsockname()[:2])}"
    broker = RequestBroker(most_open=_most_open(command), statistics=ServerStatistics())
    broker.is_stopping = lambda: stop_request.requested
    app = web.create_app(broker, secret=secret)
    with web.served(app, sock):
        if (folder := os.environ.get(Env.RUN_DIR)) is not None:
            web.write_address(pathlib.Path(folder) / ADDRESS_FILE, url)
        yield HttpFrontend(command=command, app=app, broker=broker, url=url, progress=progress)


def address_of(command: ServeCommand) -> tuple[str, int]:
    """Return host and port to listen at: those of the backend, or of the flags. Raises UsageError."""
    given = os.environ.get(Env.SERVE_ADDRESS)
    if not given:
        return command.options.host, command.options.port
    host, _, port = given.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"{Env.SERVE_ADDRESS.value}={given} is not host:port")
    return host, int(port)


def describe(command: ServeCommand, config: TrainerConfig) -> "ServedModel":
    """Describe the model for users. Raises DataError, CheckpointError for files of its folder that cannot be read."""
    from megatronapp_trainer.data import tokenizer as tokenizers
    from megatronapp_trainer.data.chat_template import read_template
    from megatronapp_trainer.serve.perturbation.named_recipes import read_perturbations
    from megatronapp_trainer.serve.served_model import ServedModel

    data = config.data
    tokenizer, folder = None, newest_arguments(command.load)[0]
    if data.tokenizer_file is not None or data.vocab_file is not None:
        tokenizer = tokenizers.load(
            vocab_file=data.vocab_file, merge_file=data.merge_file, tokenizer_file=data.tokenizer_file
        )
    assert data.vocab_size is not None
    return ServedModel(
        name=os.environ.get(Env.JOB) or command.load.resolve().name,
        created=int(time.time()),
        capacity=capacity_of(command, config),
        vocab_size=data.vocab_size,
        most_prompts=command.options.max_batch_size,
        most_open=_most_open(command),
        most_tokens=command.options.max_tokens,
        tokenizer=tokenizer,
        tokens=read_text_tokens(folder),
        perturbations=read_perturbations(command.options.scope_perturbations),
        chat=read_template(folder, *_folder_of(data.tokenizer_file or data.vocab_file)),
    )


def _folder_of(tokenizer: str | None) -> list[pathlib.Path]:
    """Return the folder of a tokenizer and its settings."""
    if tokenizer is None:
        return []
    path = pathlib.Path(tokenizer)
    return [path if path.is_dir() else path.parent]


def load_secret() -> str | None:
    """Read the job's secret; None if no file is named. Raises UsageError for a file that cannot be read."""
    path = os.environ.get(Env.SECRET_FILE)
    if not path:
        return None
    try:
        return read_secret(pathlib.Path(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"{Env.SECRET_FILE.value}={path}: {error}") from error


def _most_open(command: ServeCommand) -> int:
    return command.options.max_batch_size + command.options.queue_length
