"""`megatronapp trace`, `scope`, `whatif`, `scan` and `aggregate`, under the entry points "megatronapp.commands".

Heavy modules are imported when a command runs.
"""

import argparse
import pathlib

from megatronapp_analyzer.cli import offline_commands
from megatronapp_common.cli import write_trace_file
from megatronapp_common.state import raise_state_errors


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `trace`, `scope` and `scan` with their subcommands, `whatif` and `aggregate`."""
    trace = subparsers.add_parser("trace", help="export or import a trace", description="Traces of jobs.")
    commands = trace.add_subparsers(dest="trace_command", metavar="COMMAND", required=True)
    export = commands.add_parser(
        "export",
        help="write a trace that Perfetto and chrome://tracing open",
        description="Write the trace of a job for a viewer, from its hub or, after its end, from its stored traces.",
    )
    export.add_argument("job", metavar="JOB", help="name of the job")
    export.add_argument("-o", "--output", metavar="FILE", type=pathlib.Path, required=True, help="file to write")
    export.add_argument(
        "--from", dest="first", metavar="N", type=step_number, help="first step (default: the newest 50)"
    )
    export.add_argument("--to", dest="last", metavar="N", type=step_number, help="last step (default: the newest)")
    export.add_argument(
        "--format",
        choices=("chrome", "perfetto"),
        help="Chrome JSON, or Perfetto's protobuf, which is half of the size (default: perfetto for FILE.pftrace, "
        "otherwise chrome)",
    )
    export.add_argument(
        "--verdict", metavar="ID", help="only about 1 MB around the evidence of this verdict, and no --from or --to"
    )
    export.set_defaults(func=run_export)
    offline_commands.register_import(commands)
    offline_commands.register_archive(commands)
    register_scope(subparsers)
    register_whatif(subparsers)
    offline_commands.register_scan(subparsers)
    offline_commands.register_aggregate(subparsers)


def register_whatif(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `whatif` to the commands."""
    whatif = subparsers.add_parser(
        "whatif",
        help="say how much time slow workers, stages and operations have cost",
        description="Replay recorded steps with the usual durations of operations, and say how much time was lost "
        "and which worker, stage or operation caused it. The file has the columns of the public straggler traces "
        "(docs/whatif.md).",
    )
    whatif.add_argument("file", metavar="FILE", type=pathlib.Path, help="recorded operations (*.parquet)")
    whatif.add_argument("--json", action="store_true", help="print one JSON object with all numbers")
    whatif.add_argument(
        "--idealise",
        choices=("pooled", "work"),
        default="pooled",
        help="expect operations to take equally long that are of one kind (pooled), or of one kind, stage and chunk of "
        "the model (work) (default: %(default)s)",
    )
    whatif.set_defaults(func=run_whatif)


def run_whatif(arguments: argparse.Namespace) -> int:
    """Analyse a file and print the result."""
    import json

    from megatronapp_analyzer.whatif.analysis import Idealise, analyze
    from megatronapp_analyzer.whatif.recording import read_parquet
    from megatronapp_analyzer.whatif.report import text

    result = analyze(read_parquet(arguments.file), Idealise(arguments.idealise))
    print(json.dumps(result.document(), indent=1) if arguments.json else text(result))
    return 0


def register_scope(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `scope` with its subcommands."""
    scope = subparsers.add_parser("scope", help="inspect a model", description="MegaScope: what a model computes.")
    commands = scope.add_subparsers(dest="scope_command", metavar="COMMAND", required=True)
    replay = commands.add_parser(
        "replay",
        help="show a recorded session without a model",
        description="Serve pages and interface from a session that a hub has recorded; of a broken file the part "
        "before the break.",
    )
    replay.add_argument("file", metavar="FILE", type=pathlib.Path, help="the session (*.scope)")
    replay.add_argument(
        "--speed",
        choices=("1", "10", "step", "all"),
        default="1",
        help="the recorded speed, ten times as fast, a step for each line typed, or all at once (default: %(default)s)",
    )
    replay.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free one (default)")
    replay.set_defaults(func=run_replay)


def run_replay(arguments: argparse.Namespace) -> int:
    """Serve the session until a signal is received."""
    from megatronapp_analyzer.hub.replay import replay

    return replay(arguments.file, speed=arguments.speed, port=arguments.port)


def step_number(text: str) -> int:
    """Parse a step, counted from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a step; write a whole number from 0 on")
    return int(text)


def run_export(arguments: argparse.Namespace) -> int:
    """Fetch or rebuild the trace and write it."""
    from megatronapp_analyzer.cli import fetch
    from megatronapp_analyzer.errors import ExportError
    from megatronapp_analyzer.hub.export.formats import TraceFormat, summary

    if arguments.first is not None and arguments.last is not None and arguments.last < arguments.first:
        raise ExportError(f"--to is before --from: {arguments.last} is less than {arguments.first}; swap them")
    if arguments.verdict is not None and (arguments.first, arguments.last) != (None, None):
        raise ExportError("--verdict chooses its own steps; leave out --from and --to")
    request = fetch.TraceRequest(
        first=arguments.first,
        last=arguments.last,
        format_=TraceFormat.of_file(arguments.output) if arguments.format is None else TraceFormat(arguments.format),
        verdict=arguments.verdict,
    )
    with raise_state_errors():
        content, source = fetch.trace(fetch.job_folder(arguments.job), request)
    write_trace_file(arguments.output, content)
    described = summary(content, request.format_)
    print(f"{arguments.output}: {described}, {source}; open it at https://ui.perfetto.dev")
    return 0
