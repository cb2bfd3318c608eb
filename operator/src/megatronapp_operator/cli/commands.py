"""Parsers of the subcommands. The module of a subcommand is imported when it runs."""

import argparse
import importlib
from collections.abc import Callable
from typing import Any

from megatronapp_common.command_parser import JOB_NAMES, add_renamed_option
from megatronapp_common.state import raise_state_errors
from megatronapp_operator.cli import cluster
from megatronapp_operator.cli.text.durations import parse_duration
from megatronapp_operator.cli.text.numbers import parse_count, parse_factor, parse_index
from megatronapp_operator.cli.text.server_spellings import add_spellings
from megatronapp_operator.errors import OperatorError

Subparsers = Any
"""Type of `subparsers`: argparse's own type is private and generic over the parser class."""
LOCAL = frozenset({"validate", "serve"})
"""Subcommands that do not support clusters."""
WHERE = f"""Any of these, or the variable {cluster.CONTEXT_VARIABLE} (a context), selects jobs of a cluster; without
any of them, jobs of this machine are selected."""


def register(subparsers: Subparsers) -> None:
    """Add run, serve, validate, get, describe, logs, wait, delete, inject, training and ui."""
    for add in (_run, _serve, _validate, _get, _describe, _logs, _wait, _delete, _inject, _training, _ui):
        add(subparsers)


def extend(subparsers: Subparsers) -> None:
    """Add the options of a cluster to `trace export`, of the analyzer, `trace window` next to it, and the options of a
    job to `transport bench`.
    """
    trace = _below(subparsers, "trace")
    _extend_export(_below(trace, "export"))
    if trace is not None:
        _window(_commands_of(trace))
    _extend_bench(_below(_below(subparsers, "transport"), "bench"))


def _extend_export(export: Any) -> None:  # noqa: ANN401 - a parser, or None
    if export is None:
        return
    here, there = export.get_default("func"), _command("trace")
    _add_cluster(export)
    _add_gateway(export)
    export.set_defaults(func=lambda arguments: (there if cluster.meant(arguments) else here)(arguments))


def _extend_bench(bench: Any) -> None:  # noqa: ANN401 - a parser, or None
    """Add `--job` to the bench, which the trainer has: this part knows the hubs of jobs, that one the transport."""
    if bench is None:
        return
    measure, show = bench.get_default("func"), _command("transport")
    group = bench.add_argument_group("of a job", "What the hub of a job has measured of its ranks' own messages.")
    named = group.add_argument("--job", metavar="NAME", help="pairs of the ranks of a job that runs, by path")
    named.complete = {"bash": JOB_NAMES}  # read by shtab
    _add_cluster(bench)
    _add_gateway(bench)
    bench.set_defaults(bench_defaults={name: bench.get_default(name) for name in ("ranks", "sizes", "rounds", "gloo")})

    def run(arguments: argparse.Namespace) -> int:
        if arguments.job is not None:
            return show(arguments)
        if cluster.given(arguments):
            raise OperatorError("the options of a cluster select the job of --job NAME; give it, or leave them out")
        code: int = measure(arguments)
        return code

    bench.set_defaults(func=run)


def _below(above: Any, name: str) -> Any:  # noqa: ANN401
    """Return the parser of a subcommand of a parser or of its subparsers; None if it does not exist."""
    if isinstance(above, argparse.ArgumentParser):
        above = _commands_of(above)
    return None if above is None else above.choices.get(name)


def _commands_of(parser: argparse.ArgumentParser) -> Any:  # noqa: ANN401 - argparse's action, or None
    """Return the subparsers of a parser; None if it has no subcommands."""
    return next((action for action in parser._actions if isinstance(action, argparse._SubParsersAction)), None)


def _command(module: str) -> Callable[[argparse.Namespace], int]:
    def call(arguments: argparse.Namespace) -> int:
        folder = "cli.cluster" if cluster.meant(arguments) and module not in LOCAL else "cli"
        loaded = importlib.import_module(f"megatronapp_operator.{folder}.{module}")
        with raise_state_errors():
            code: int = loaded.main(arguments)
        return code

    return call


def _add(subparsers: Subparsers, name: str, text: str, *, description: str | None = None) -> argparse.ArgumentParser:
    sentence = f"{text[0].upper()}{text[1:]}."
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=text, description=description or sentence)
    parser.set_defaults(func=_command(name))
    if name not in LOCAL:
        _add_cluster(parser)
    return parser


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("on a cluster", WHERE)
    where.add_argument("--context", metavar="NAME", help="context of the kubeconfig")
    where.add_argument("-n", "--namespace", metavar="NAME", help="namespace (default: that of the context)")
    where.add_argument("--kubeconfig", metavar="FILE", help="kubeconfig (default: $KUBECONFIG or ~/.kube/config)")
    where.add_argument("--cluster", action="store_true", help="use the kubeconfig's current context and namespace")


def _add_gateway(parser: argparse.ArgumentParser) -> None:
    """Add options for subcommands that connect to hubs."""
    text = "on a cluster: URL or NAMESPACE/SERVICE of the gateway (default: discover it)"
    parser.add_argument("--gateway", metavar="WHERE", help=text)
    add_renamed_option(parser, "--door", "--gateway")
    text = "on a cluster: log in with a token of this service account (default: your own, or another that you may use)"
    parser.add_argument("--service-account", metavar="[NAMESPACE/]NAME", help=text)


def _add_job(parser: argparse.ArgumentParser, text: str = "name of a job", *, nargs: str | None = None) -> None:
    """Add the name of a job as an argument, with completion in the shell."""
    job = parser.add_argument("job", nargs=nargs, metavar="JOB", help=text)
    job.complete = {"bash": JOB_NAMES}  # type: ignore[attr-defined] # read by shtab


def _run(subparsers: Subparsers) -> None:
    text = """Run a MegatronJob on this machine: every worker is a group of processes. Or store it on a
cluster and follow its events: Ctrl-C then only ends the following, and `megatronapp logs -f` prints the log.

Without --detach the job runs in the foreground: the first Ctrl-C writes a checkpoint and stops it, the second kills
it. On a terminal the pages stay open for spec.analyzer.retainSeconds after the end, or until Ctrl-C.
Paths in the manifest are relative to the current folder.
Exit code: 0 complete, 1 failed or refused, 2 bad manifest, 130 interrupted."""
    parser = _add(subparsers, "run", "run a job on this machine or a cluster", description=text)
    parser.add_argument("file", metavar="FILE", help="MegatronJob in YAML or JSON; - reads standard input")
    parser.add_argument("--name", help="name of the job, in place of metadata.name")
    _add_profile(parser, "on this machine: ")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--follow", action="store_true", help="also print progress, the trainer's log and verdicts")
    how.add_argument("--detach", action="store_true", help="return at once; the job survives the terminal")


def _serve(subparsers: Subparsers) -> None:
    text = """Serve a checkpoint on this machine by an OpenAI-compatible API until the job is deleted. Without
--detach it runs in the foreground: Ctrl-C stops it. Once it is ready, address and key are printed.
On a cluster: megatronapp serve --load DIRECTORY --manifest | kubectl apply -f -, with volume and image added.
Exit code: 1 failed or refused, 2 bad options, 130 interrupted."""
    parser = _add(subparsers, "serve", "serve a checkpoint on this machine", description=text)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--load", metavar="DIRECTORY", help="directory of checkpoints; the newest complete one is served")
    what.add_argument(
        "--print", dest="job", metavar="JOB", help="only print address and key of a job, as shell exports"
    )
    parser.add_argument("--name", default="serve", help="name of the job, and of the model (default: %(default)s)")
    _add_serve_layout(parser)
    _add_serve_limits(parser)
    parser.add_argument("--pages", action=argparse.BooleanOptionalAction, default=True, help="serve the pages, too")
    parser.add_argument(
        "--scope-plugins", nargs="+", metavar="MODULE", help="Python modules that register sites for MegaScope"
    )
    parser.add_argument("--manifest", action="store_true", help="only print the MegatronJob")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--follow", action="store_true", help="also print progress and the log of rank 0")
    how.add_argument("--detach", action="store_true", help="return at once; the job survives the terminal")
    parser.add_argument("args", nargs="*", metavar="-- FLAGS", help="other flags of the trainer")
    add_spellings(parser)


def _add_serve_layout(parser: argparse.ArgumentParser) -> None:
    for size, text in (("tensor", "ranks that share each layer"), ("pipeline", "pipeline stages")):
        flag = f"--{size}-model-parallel-size"
        parser.add_argument(flag, type=parse_count, default=1, metavar="N", help=f"{text} (default: %(default)s)")
    parser.add_argument("--gpu", action="store_true", help="use a GPU for each rank (default: the CPU)")
    parser.add_argument(
        "--precision", choices=("fp32", "bf16", "fp16"), help="precision of the weights (default: as trained)"
    )
    parser.add_argument(
        "--tokenizer-file", metavar="FILE", help="tokenizer.json (default: the checkpoint's, if it has one)"
    )
    parser.add_argument("--vocab-file", metavar="FILE", help="vocab.json of a GPT-2 BPE, together with --merge-file")
    parser.add_argument("--merge-file", metavar="FILE", help="merges.txt of a GPT-2 BPE")


def _add_serve_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=parse_index, metavar="P", help="port to listen on; 0: a free one (default: 8000)"
    )
    limits = {
        "--max-batch-size": "prompts that are generated together",
        "--max-tokens": "most new tokens of a prompt",
        "--max-length": "most tokens of a prompt and its completion",
        "--prefill-chunk": "tokens of prompts that one forward pass reads",
    }
    for flag, text in limits.items():
        parser.add_argument(flag, type=parse_count, metavar="N", help=text)
    parser.add_argument("--queue-length", type=parse_index, metavar="N", help="prompts that may wait")


def _validate(subparsers: Subparsers) -> None:
    text = """Check manifests by the same rules as the API server, without one; every problem is listed with its field.
Flags in spec.args, corpora and tokenizers are checked by `run`, before it starts anything.
Exit code: 0 all valid, 2 some invalid."""
    parser = _add(subparsers, "validate", "check manifests", description=text)
    parser.add_argument("files", metavar="FILE", nargs="+", help="MegatronJob in YAML or JSON; - reads standard input")
    _add_profile(parser, "")


def _add_profile(parser: argparse.ArgumentParser, where: str) -> None:
    text = f"{where}merge the job over this MegatronProfile or ClusterMegatronProfile; one of each kind"
    parser.add_argument("--profile", metavar="FILE", action="append", default=[], help=text)


def _get(subparsers: Subparsers) -> None:
    parser = _add(subparsers, "get", "list jobs, or show one")
    _add_job(parser, "name of a job (default: all jobs)", nargs="?")
    parser.add_argument("-o", "--output", choices=("json", "yaml", "wide", "name"), help="form of the output")
    parser.add_argument("-w", "--watch", action="store_true", help="keep printing a line for each change")
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="on a cluster: jobs of all namespaces")
    parser.add_argument("--no-headers", action="store_true", help="omit the line of column names")


def _describe(subparsers: Subparsers) -> None:
    parser = _add(subparsers, "describe", "show state, failures and events of a job")
    _add_job(parser)
    text = "list all fields of the spec with values and origins: the job, a profile, or the default"
    parser.add_argument("--fields", action="store_true", help=text)


def _logs(subparsers: Subparsers) -> None:
    text = """Print the log of one process of a job: by default of the rank that reports the loss.
On a cluster the log of an attempt is deleted with its pods; attempts restarted in place share the log of their pod."""
    parser = _add(subparsers, "logs", "print the log of a rank or a worker", description=text)
    _add_job(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="keep printing until the job has ended")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, metavar="N", help="log of this global rank")
    which.add_argument("--worker", type=int, metavar="N", help="log of this worker's launcher")
    parser.add_argument("--attempt", type=int, metavar="N", help="number of the attempt (default: the newest)")
    parser.add_argument("--tail", type=int, metavar="LINES", help="print only this many of the last lines")


def _wait(subparsers: Subparsers) -> None:
    text = """Wait until a condition of a job is true, or until it is deleted.
Exits early with code 1 if the job has ended in another way."""
    parser = _add(subparsers, "wait", "wait for a condition of a job", description=text)
    _add_job(parser)
    parser.add_argument(
        "--for",
        dest="condition",
        required=True,
        metavar="condition=TYPE[=VALUE]|delete",
        help="such as condition=Complete, condition=Running=false, delete",
    )
    parser.add_argument(
        "--timeout",
        type=parse_duration,
        default=30.0,
        metavar="TIME",
        help="such as 90s, 10m, 1h30m; negative waits without limit (default: 30s)",
    )


def _delete(subparsers: Subparsers) -> None:
    parser = _add(subparsers, "delete", "stop a job and delete it with its logs; checkpoints are kept")
    _add_job(parser)
    parser.add_argument("--ignore-not-found", action="store_true", help="exit with code 0 if the job does not exist")
    parser.add_argument("--force", action="store_true", help="do not wait for a checkpoint")


def _inject(subparsers: Subparsers) -> None:
    text = """Make one rank slow for some steps, to see whether MegaScan finds it.
Needs spec.analyzer.enabled and spec.trace.enabled."""
    parser = _add(subparsers, "inject", "make one rank slow for a while", description=text)
    _add_job(parser, "name of a running job")
    parser.add_argument("--rank", type=parse_index, required=True, metavar="R", help="global rank to make slow")
    parser.add_argument("--kind", choices=("compute", "host", "link"), required=True, help="what is slow")
    parser.add_argument("--factor", type=parse_factor, required=True, metavar="F", help="slowdown, above 1")
    parser.add_argument("--from-step", type=parse_index, required=True, metavar="N", help="first step")
    parser.add_argument("--steps", type=parse_count, required=True, metavar="M", help="number of steps")
    _add_gateway(parser)
    parser.add_argument("--peer", type=parse_index, metavar="R", help="with --kind link: only messages from this rank")


def _window(subparsers: Subparsers) -> None:
    text = """Record parts of the passes of some steps of a running job: all tensor-parallel collectives, and the
attention, MLP, norms, embedding and loss of each layer. Needs spec.analyzer.enabled and spec.trace.enabled."""
    parser = subparsers.add_parser("window", help="record some steps of a running job in detail", description=text)
    parser.set_defaults(func=_command_of_windows)
    _add_job(parser, "name of a running job")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--steps", type=parse_count, metavar="N", help="number of steps")
    what.add_argument("--cancel", metavar="ID", help="record no further step of this window, in place of a new one")
    parser.add_argument(
        "--from-step",
        type=parse_index,
        metavar="N",
        help="first step, at most 100000 after the newest (default: as soon as all ranks can know of it)",
    )
    parser.add_argument(
        "--ranks", type=parse_index, nargs="+", metavar="R", help="with their tensor groups (default: all ranks)"
    )
    parser.add_argument(
        "--granularity",
        choices=("base", "full"),
        default="full",
        help="base: tensor-parallel collectives; full: parts of layers, too (default: %(default)s)",
    )
    _add_cluster(parser)
    _add_gateway(parser)


def _command_of_windows(arguments: argparse.Namespace) -> int:
    place = "cluster" if cluster.meant(arguments) else "local"
    loaded = importlib.import_module(f"megatronapp_operator.cli.windows.{place}")
    with raise_state_errors():
        code: int = loaded.main(arguments)
    return code


def _training(subparsers: Subparsers) -> None:
    text = """Pause, resume, step or stop a running training, capture statistics of its layers, perturb it, or print its
state. All ranks obey at the end of the same step. Needs spec.scope.training.enabled. One client controls a training at
a time: the command takes the control for its order, which is refused while another one has it."""
    parser = _add(subparsers, "training", "pause, resume, step, stop or capture a running training", description=text)
    _add_job(parser, "name of a running job")
    orders = ("pause", "resume", "step", "stop", "capture", "perturb", "status")
    parser.add_argument("order", choices=orders, help="stop writes a checkpoint and completes the job")
    parser.add_argument(
        "value", nargs="?", metavar="N|FILE", help="with step: number of steps; with perturb: recipe in JSON"
    )
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--every", type=parse_count, metavar="N", help="with capture: every n-th step from now on")
    when.add_argument("--now", action="store_true", help="with capture: the next step; the default")
    when.add_argument("--off", action="store_true", help="with capture: no step from now on")
    perturbed = parser.add_argument_group(
        "perturb", "Change parameters or activations by a recipe (docs/perturbation.md)."
    )
    perturbed.add_argument("--undo", action="store_true", help="end the perturbation in force")
    perturbed.add_argument(
        "--target",
        choices=("model", "master"),
        help="parameters of the next step (the default), or those of the optimizer",
    )
    perturbed.add_argument(
        "--steps", type=parse_count, metavar="N", help="steps of activations (default: until --undo)"
    )
    perturbed.add_argument("--replica", type=parse_index, metavar="N", help="one data-parallel replica (default: all)")
    parser.add_argument("--force", action="store_true", help="take the control from the client that has it")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until the ranks obey")
    parser.add_argument("--json", action="store_true", help="with status: print it as JSON")
    _add_gateway(parser)
    parser.set_defaults(func=_training_command)


def _training_command(arguments: argparse.Namespace) -> int:
    place = "cluster" if cluster.meant(arguments) else "local"
    module = importlib.import_module(f"megatronapp_operator.cli.training.{place}")
    with raise_state_errors():
        code: int = module.main(arguments)
    return code


def _ui(subparsers: Subparsers) -> None:
    text = """Open the pages of a job by an address that logs the browser in once, within a minute, on a cluster within
five. On a cluster a port is forwarded to the gateway until Ctrl-C, with your own rights; without JOB it lists the
jobs. For a job of this machine that has ended, the stored pages are served until Ctrl-C."""
    parser = _add(subparsers, "ui", "open the pages of a job", description=text)
    _add_job(parser, nargs="?")
    _add_gateway(parser)
    parser.add_argument("--print", action="store_true", dest="print_only", help="only print the address")
