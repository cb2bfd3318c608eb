"""Translations of commands, flags and names that a user may type as in MegatronApp."""

import dataclasses
import itertools
import re
import shlex
from collections.abc import Iterator, Sequence

from megatronapp_common.migration.commands import COMMANDS, LegacyCommand
from megatronapp_common.migration.megatron_flags import without_unavailable
from megatronapp_common.migration.names import FLAGS, NAMES, VARIABLES

_CONTINUED = re.compile(r"\\[ \t]*(?:#[^\n]*)?\n")
_COMMENT = re.compile(r"(?:^|(?<=\s))#[^\n]*")
_OPTIONS_BELOW = re.compile(r"\n\s*(?=-)")
_BREAK = re.compile(r"&&|\|\||;|\n")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_LAUNCHERS = {"bash", "sh", "source", ".", "python", "python3", "nohup", "sudo", "exec", "time", "env", "export"}
_HARMLESS = {"cd", "mkdir", "set", "ls", "rm", "echo", "cp", "mv"}
"""Commands of a shell, which work unchanged."""
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


def find_translations(text: str) -> list[Translation]:
    """Return translations of everything that is known in a text; empty if nothing is."""
    found: dict[str, Translation] = {}
    whole = text.strip()
    if whole in NAMES:
        return [Translation(whole, (), NAMES[whole])]
    for line in _lines(text):
        for answer in _of_line(line):
            found.setdefault(answer.theirs, answer)
    return list(found.values())


def report(words: Sequence[str]) -> tuple[str, bool]:
    """Describe the arguments of a command line; return the text, and true if all of them were known."""
    text = words[0] if len(words) == 1 else _join(words)
    found = find_translations(text)
    if not found:
        return f"{text}: no command of MegatronApp's pages; docs/from-megatronapp.md lists them", False
    return "\n".join(line for answer in found for line in _describe(answer)), True


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


def instead(words: Sequence[str], *, name: int) -> str | None:
    """Return the command that replaces an old one, and why; None if `words` is not an old one.

    The first `name` words are the command's name; its options follow.
    """
    line = " ".join(words[:name])
    old = next((one for one in COMMANDS if re.fullmatch(one.pattern, line)), None)
    if old is None:
        return None
    return f"{_filled(old, words[name:], [], line)[0]} ({old.why})"


def _lines(text: str) -> Iterator[str]:
    joined = _COMMENT.sub("", _CONTINUED.sub(" ", text))
    for line in _BREAK.split(_OPTIONS_BELOW.sub(" ", joined)):
        if line.strip():
            yield line.strip()


def _of_line(line: str) -> Iterator[Translation]:
    try:
        words = shlex.split(line)
    except ValueError:  # an open quote
        words = line.split()
    while words and (match := _ASSIGNMENT.fullmatch(words[0])) is not None:
        if match[1] in VARIABLES:
            yield Translation(match[1], (), VARIABLES[match[1]])
        yield from _of_flags(match[2].split())
        words.pop(0)
    if words and words[0].startswith("--"):
        yield from _of_flags(words)
        return
    yield from _of_command(line, words)


def _of_flags(words: Sequence[str]) -> Iterator[Translation]:
    for word in words:
        flag = word.partition("=")[0]
        if flag in FLAGS:
            yield Translation(flag, (), FLAGS[flag])


def _of_command(line: str, words: list[str]) -> Iterator[Translation]:
    launch: list[str] = []
    while words and words[0] in _LAUNCHERS:
        words = words[1:]
    if words and words[0] == "torchrun":
        size = next((place for place, word in enumerate(words) if word.endswith(".py")), 1)
        launch, words = words[1:size], words[size:]
    if not words:
        return
    plain = " ".join([words[0].rpartition("/")[2], *words[1:]])
    for old in COMMANDS:
        if _matches(old, plain):
            behind = words[2:] if words[0] == "megatronapp" else words[1:]
            trains = any("{train}" in command for command in old.here)
            refused = without_unavailable(behind)[1] if trains else ()
            yield Translation(line, tuple(_filled(old, behind, launch, line)), old.why, old.later, tuple(refused))
            return
    if words[0] in _HARMLESS:
        yield Translation(line, (line,), "runs as it is")


def _matches(old: LegacyCommand, plain: str) -> bool:
    """Return true if the pattern matches the program's name, its first arguments, or the whole command."""
    return re.fullmatch(rf"(?:{old.pattern})(?: .*)?", plain) is not None


def _filled(old: LegacyCommand, behind: Sequence[str], launch: Sequence[str], line: str) -> list[str]:
    """Return the new commands with the original arguments filled in."""

    def value(match: re.Match[str]) -> str:
        name, _, default = match[1].partition("=")
        if name == "same":
            return line
        if name == "train":
            return _join(without_unavailable(behind)[0])
        if name in ("args", "launch"):
            return _join(behind if name == "args" else launch)
        if name.isdigit():
            given = [word for word in behind if not word.startswith("-")]
            return given[int(name) - 1] if len(given) >= int(name) else default
        return next((after for flag, after in itertools.pairwise(behind) if flag == name), default)

    return [" ".join(_PLACE.sub(value, command).split()) for command in old.here]


def _join(words: Sequence[str]) -> str:
    """Join the words as a shell needs them; its substitutions (`$RANK`) remain."""
    quoted = (word if _PLAIN.fullmatch(word) and "$(" not in word else _quoted(word) for word in words)
    return " ".join(quoted)


def _quoted(word: str) -> str:
    return f'"{word}"' if "$" in word else shlex.quote(word)
