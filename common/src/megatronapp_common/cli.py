"""The command `megatronapp`. Its subcommands are registered by the installed parts.

A part registers under the entry-point group "megatronapp.commands" a function
``register(subparsers: argparse._SubParsersAction) -> None``. It adds its subcommands and gives each (or each of their
own subcommands) a default ``func(args: argparse.Namespace) -> int``, whose result is the exit code. Registering must
stay light: heavy modules are imported when the function runs. The module of that function may also have a function
``extend(subparsers)``, which is called when all parts have registered: so one part adds to the subcommands of another.

Exit codes: 0 done; 1 refused or failed, with one `error:` line per problem; 2 a wrong command line; 130 Ctrl-C.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence

from megatronapp_common.command_parser import JOB_NAMES, CommandParser, RootParser
from megatronapp_common.errors import OutputError
from megatronapp_common.text.terminal import replace_control_characters

GROUP = "megatronapp.commands"
PROG = "megatronapp"
PLUGIN_PROG = "kubectl megatron"
FAILURE_EXIT_CODE = 1
INTERRUPTED_EXIT_CODE = 130
BROKEN_PIPE_EXIT_CODE = 141
_PREAMBLE = {
    "bash": f"""\
{JOB_NAMES}() {{
  local names
  names="$({PROG} get --output name 2> /dev/null)" || return 0
  compgen -W "${{names//megatronjob.megatronapp.io\\//}}" -- "$1"
}}
"""
}
SHELLS = ("bash", "zsh", "tcsh")
_DESCRIPTION = "Train GPT and BERT models with Megatron-core on this machine or a cluster, and see which rank is slow."
_EXAMPLES = """\
examples:
  megatronapp data prepare --input 'src/**/*.py' --output corpus --train-tokenizer --vocab-size 4096
  megatronapp run job.yaml --follow
  megatronapp inject demo --rank 2 --kind compute --factor 3 --from-step 100 --steps 50
  megatronapp completion bash > ~/.local/share/bash-completion/completions/megatronapp
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution with subcommands. Its command names are listed here to report it where it is not installed."""

    title: str
    distribution: str
    commands: tuple[str, ...]


PARTS = {
    "jobs": Distribution(
        "jobs",
        "megatronapp-operator",
        ("run", "serve", "validate", "get", "describe", "logs", "wait", "delete", "inject", "training", "ui"),
    ),
    "data": Distribution("data", "megatronapp-trainer", ("data",)),
    "checkpoint": Distribution("checkpoints", "megatronapp-trainer", ("checkpoint",)),
    "transport": Distribution("transfers between ranks", "megatronapp-trainer", ("transport",)),
    "trace": Distribution(
        "traces and MegaScope", "megatronapp-analyzer", ("trace", "scope", "whatif", "scan", "aggregate")
    ),
}


def kubectl_plugin(arguments: Sequence[str] | None = None) -> int:
    """Run `kubectl megatron`: the same command line, in which jobs are those of the kubeconfig's current cluster."""
    return main(arguments, prog=PLUGIN_PROG)


def main(arguments: Sequence[str] | None = None, *, prog: str = PROG) -> int:
    """Run the command line and return its exit code. ``arguments`` default to those of the process."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser(importlib.metadata.entry_points(group=GROUP), prog=prog)
    try:
        values = parser.parse_args(words)
        if prog == PLUGIN_PROG and hasattr(values, "cluster"):
            values.cluster = True
        func = getattr(values, "func", None)
        if func is None:
            parser.print_help()
            return 0
        return int(func(values))
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else FAILURE_EXIT_CODE
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit is quiet
        return BROKEN_PIPE_EXIT_CODE
    except Exception as error:
        if not is_ours(error):
            raise
        for line in str(error).splitlines():
            print(f"error: {replace_control_characters(line)}", file=sys.stderr)
        return FAILURE_EXIT_CODE


def is_ours(error: Exception) -> bool:
    """Return true for exceptions of the project's packages, whose messages are for users; others are bugs."""
    return type(error).__module__.startswith("megatronapp_")


def write_trace_file(path: pathlib.Path, content: bytes) -> None:
    """Write the trace that a command exports, the whole file or nothing. Raises OutputError."""
    unfinished = path.parent / f"{path.name}.part"
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # where no file could be created, this may fail for the same reason
            unfinished.unlink()
        raise OutputError(f"{path}: cannot write the trace: {error.strerror}; choose another -o FILE") from error


def build_parser(entry_points: Iterable[importlib.metadata.EntryPoint], *, prog: str = PROG) -> RootParser:
    """Build the parser with the subcommands of every part among these entry points that can be loaded."""
    parser = RootParser(prog=prog, description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="show program's version number and exit")
    found = {point.name: point for point in entry_points}
    for name in [*PARTS, *(name for name in found if name not in PARTS)]:
        _add_part(parser, name, found.get(name))
    for point in found.values():
        _extend(parser, point)
    before = set(parser.commands.choices)
    _add_completion(parser)
    parser.add_section("shell", set(parser.commands.choices) - before)
    _add_translate(parser)
    parser.add_section("from MegatronApp and Megatron-LM", ["translate"])
    return parser


class _PrintVersion(argparse.Action):
    """Print the version, which takes some 10 ms to find, only if it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print the version and exit the process."""
        print(f"{PROG} {importlib.metadata.version('megatronapp-common')}")
        parser.exit()


def _add_part(parser: RootParser, name: str, point: importlib.metadata.EntryPoint | None) -> None:
    """Add a part's subcommands, or the reason why they are missing."""
    part = PARTS.get(name, Distribution(name, name, ()))
    if point is None:
        parser.add_absent(part.commands, f"{part.distribution} is not installed; pip install {part.distribution}")
        return
    try:
        register: Callable[[object], None] = point.load()
    except (ImportError, AttributeError) as error:
        parser.add_absent(part.commands, f"{part.distribution} is installed but cannot be loaded: {error}")
        return
    before = set(parser.commands.choices)
    register(parser.commands)
    parser.add_section(part.title, (command for command in parser.commands.choices if command not in before))


def _extend(parser: RootParser, point: importlib.metadata.EntryPoint) -> None:
    """Let a part add to the subcommands of others. A part that is not loaded has been reported already."""
    extend: Callable[[object], None] | None = getattr(sys.modules.get(point.module), "extend", None)
    if extend is not None:
        extend(parser.commands)


def _add_completion(parser: RootParser) -> None:
    command: CommandParser = parser.commands.add_parser(
        "completion", help="print a completion script", description="Print a script that completes this command."
    )
    command.add_argument("shell", choices=SHELLS, help="shell that it is for")

    def show(values: argparse.Namespace) -> int:
        import shtab

        print(shtab.complete(parser, shell=values.shell, preamble=_PREAMBLE))
        return 0

    command.set_defaults(func=show)


def _add_translate(parser: RootParser) -> None:
    text = """Print what to run instead of a command, script, flag or variable of MegatronApp or Megatron-LM; nothing
is run. Write a command as one argument in quotes, or without quotes after --; a script of yours as "$(cat FILE)".
Flags that the answer does not mention stay as they are; the trainer refuses those that it does not know.
Exit code: 0 with an answer, 1 without."""
    command: CommandParser = parser.commands.add_parser(
        "translate", help="print what to run instead of an old command", description=text
    )
    command.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND", help="as it would be typed there")

    def show(values: argparse.Namespace) -> int:
        from megatronapp_common.job.arguments import field_of
        from megatronapp_common.migration.answer import report

        told, known = report([word for word in values.words if word != "--"], field_of)
        print(told, file=sys.stdout if known else sys.stderr)
        return 0 if known else FAILURE_EXIT_CODE

    command.set_defaults(func=show)


if __name__ == "__main__":
    sys.exit(main())
