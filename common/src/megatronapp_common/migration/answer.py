"""Translations of commands, flags and names that a user may type as in MegatronApp."""

import dataclasses
import itertools
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence

from megatronapp_common.migration.commands import COMMANDS, LegacyCommand
from megatronapp_common.migration.megatron_flags import unavailable, without_unavailable
from megatronapp_common.migration.names import FLAGS, NAMES, SAME, VARIABLES

_CONTINUED = re.compile(r"\\[ \t]*(?:#[^\n]*)?\n")
_COMMENT = re.compile(r"(?:^|(?<=\s))#[^\n]*")
_OPTIONS_BELOW = re.compile(r"\n\s*(?=-)")
_BREAK = re.compile(r"&&|\|\||;|\n")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_LAUNCHERS = {"bash", "sh", "source", ".", "python", "python3", "nohup", "sudo", "exec", "time", "env", "export"}
_HARMLESS = {"cd", "mkdir", "set", "ls", "rm", "echo", "cp", "mv"}
"""Commands of a shell, which work unchanged."""
_UNKNOWN_FLAG = (
    "no manifest field and no known difference from Megatron-LM; if python -m megatronapp_trainer.pretrain --help "
    "lists it, it is the same, in a manifest in spec.args"
)
_PLACE = re.compile(r"\{(args|train|launch|same|[\w-]+=[^}]*)\}")
_PLAIN = re.compile(r"[\w@%+=:,./${}()-]+")


@dataclasses.dataclass(frozen=True, slots=True)
class Translation:
    """Answer about one command, flag, variable, file or control."""

    theirs: str
    here: tuple[str, ...]
    why: str
    later: str | None = None
    unavailable: tuple[tuple[str, str], ...] = ()
    """Original flags, with their values, that the new commands do not have, and why."""


def _no_field(_flag: str) -> str | None:
    return None


def find_translations(text: str, field_of: Callable[[str], str | None] = _no_field) -> list[Translation]:
    """Return translations of everything that is known in a text; empty if nothing is.

    `field_of` returns the field of a manifest for a flag, or None if it has no field.
    """
    found: dict[str, Translation] = {}
    whole = text.strip()
    if whole in NAMES:
        return [Translation(whole, (), NAMES[whole])]
    for line in _lines(text):
        for answer in _of_line(line, field_of):
            found.setdefault(answer.theirs, answer)
    return list(found.values())


def report(arguments: Sequence[str], field_of: Callable[[str], str | None] = _no_field) -> tuple[str, bool]:
    """Describe the arguments of a command line; return the text, and true if there is an answer.

    `field_of` is as for `find_translations`.
    """
    text = arguments[0] if len(arguments) == 1 else _join(arguments)
    found = find_translations(text, field_of)
    script = text.split()[-1] if text.split() else ""
    own = f'megatronapp translate "$(cat {script})"' if os.path.isfile(script) else None
    if found:
        lines = [line for answer in found for line in _describe(answer)]
        note = [] if own is None else [f"# what the commands and flags in this file become: {own}"]
        return "\n".join([*note, *lines]), True
    if own is not None:
        return f"{text}: no known script; give the commands in it: {own}", False
    if text.startswith("-"):
        return f"{text}: {_UNKNOWN_FLAG}", False
    return f"{text}: no command of MegatronApp's pages; docs/from-megatronapp.md lists them", False


def _describe(answer: Translation) -> Iterator[str]:
    if not answer.here:
        later = "" if answer.later is None else f"; not yet: {answer.later}"
        yield f"{answer.theirs}: {answer.why}{later}"
        return
    yield f"# {answer.why}"
    if answer.later is not None:
        yield f"# not yet: {answer.later}"
    for flag, reason in answer.unavailable:
        yield f"# not available: {flag} ({reason})"
    yield from answer.here


def instead(arguments: Sequence[str], *, name: int) -> str | None:
    """Return the command that replaces an old one, and why; None if `arguments` is not an old one.

    The first `name` arguments are the command's name; its options follow.
    """
    line = " ".join(arguments[:name])
    old = next((command for command in COMMANDS if re.fullmatch(command.pattern, line)), None)
    if old is None:
        return None
    return f"{_filled(old, arguments[name:], [], line)[0]} ({old.why})"


def _lines(text: str) -> Iterator[str]:
    joined = _COMMENT.sub("", _CONTINUED.sub(" ", text))
    for line in _BREAK.split(_OPTIONS_BELOW.sub(" ", joined)):
        if line.strip():
            yield line.strip()


def _of_line(line: str, field_of: Callable[[str], str | None]) -> Iterator[Translation]:
    try:
        arguments = shlex.split(line)
    except ValueError:  # an open quote
        arguments = line.split()
    while arguments and (match := _ASSIGNMENT.fullmatch(arguments[0])) is not None:
        if match[1] in VARIABLES:
            yield Translation(match[1], (), VARIABLES[match[1]])
        yield from _of_flags(match[2].split(), field_of)
        arguments.pop(0)
    if arguments and arguments[0].startswith("--"):
        yield from _of_flags(arguments, field_of)
        return
    yield from _of_command(line, arguments)


def _of_flags(arguments: Sequence[str], field_of: Callable[[str], str | None]) -> Iterator[Translation]:
    for argument in arguments:
        flag = argument.partition("=")[0].strip("()")  # of an array in a shell script
        answer = FLAGS.get(flag) or unavailable(flag)
        if answer is None and (field := field_of(flag)) is not None:
            answer = f"{SAME}; in a manifest {field}"
        if answer is not None:
            yield Translation(flag, (), answer)


def _of_command(line: str, arguments: list[str]) -> Iterator[Translation]:
    launch: list[str] = []
    while arguments and arguments[0] in _LAUNCHERS:
        arguments = arguments[1:]
    if arguments and arguments[0] == "torchrun":
        size = next((place for place, argument in enumerate(arguments) if argument.endswith(".py")), 1)
        launch, arguments = arguments[1:size], arguments[size:]
    if not arguments:
        return
    plain = " ".join([arguments[0].rpartition("/")[2], *arguments[1:]])
    for old in COMMANDS:
        if _matches(old, plain):
            remaining = arguments[2:] if arguments[0] == "megatronapp" else arguments[1:]
            trains = any("{train}" in command for command in old.here)
            refused = without_unavailable(remaining)[1] if trains else ()
            yield Translation(line, tuple(_filled(old, remaining, launch, line)), old.why, old.later, tuple(refused))
            return
    if arguments[0] in _HARMLESS:
        yield Translation(line, (line,), "runs as it is")


def _matches(old: LegacyCommand, plain: str) -> bool:
    """Return true if the pattern matches the program's name, its first arguments, or the whole command."""
    return re.fullmatch(rf"(?:{old.pattern})(?: .*)?", plain) is not None


def _filled(old: LegacyCommand, remaining: Sequence[str], launch: Sequence[str], line: str) -> list[str]:
    """Return the new commands with the original arguments filled in."""

    def value(match: re.Match[str]) -> str:
        name, _, default = match[1].partition("=")
        if name == "same":
            return line
        if name == "train":
            return _join(without_unavailable(remaining)[0])
        if name in ("args", "launch"):
            return _join(remaining if name == "args" else launch)
        if name.isdigit():
            given = [argument for argument in remaining if not argument.startswith("-")]
            return given[int(name) - 1] if len(given) >= int(name) else default
        return next((after for flag, after in itertools.pairwise(remaining) if flag == name), default)

    return [" ".join(_PLACE.sub(value, command).split()) for command in old.here]


def _join(arguments: Sequence[str]) -> str:
    """Join the arguments as a shell needs them; its substitutions (`$RANK`) remain."""
    quoted = (
        argument if _PLAIN.fullmatch(argument) and "$(" not in argument else _quoted(argument) for argument in arguments
    )
    return " ".join(quoted)


def _quoted(argument: str) -> str:
    return f'"{argument}"' if "$" in argument else shlex.quote(argument)
