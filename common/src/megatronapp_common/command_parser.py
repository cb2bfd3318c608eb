"""A parser that suggests the nearest known argument, and a root parser that lists commands by part."""

import argparse
import difflib
import itertools
import shlex
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from megatronapp_common.migration.answer import instead

USAGE_EXIT_CODE = 2
LISTED_NAMES = 12
JOB_NAMES = "_megatronapp_job_names"
"""Function of the bash completion that prints names of jobs; a part uses it in an argument's `complete`."""
_REQUIRED = ("the following arguments are required", "one of the arguments")
"""Beginnings of argparse's messages about missing arguments."""


class CommandParser(argparse.ArgumentParser):
    """Parser of a command and its subcommands: no abbreviations, texts kept as written, suggestions for typos."""

    def __init__(self, **keywords: Any) -> None:  # noqa: ANN401
        keywords.setdefault("allow_abbrev", False)
        keywords.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**keywords)
        self._words: list[str] = []

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse, and refuse unknown arguments here, where the command's own options are known."""
        self._words = list(args or ())
        values, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._refusal(unknown[0]))
        assert isinstance(values, argparse.Namespace)
        return values, []

    def error(self, message: str) -> NoReturn:
        """Print the message and how to get help to stderr; exit with code 2."""
        misspelt = self._misspelt_option()
        if misspelt and message.startswith(_REQUIRED):
            message = self._refusal(misspelt)  # it is why the right one is missing
        self.exit(USAGE_EXIT_CODE, f"error: {message}\nSee '{self.prog} --help'.\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:  # noqa: ANN401
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        if isinstance(action, argparse._SubParsersAction):
            self._unknown_command(str(value), choices)
        raise argparse.ArgumentError(action, f"{value!r} is not possible; {_hint(str(value), choices)}")

    def _unknown_command(self, word: str, known: Iterable[str]) -> NoReturn:
        typed = [*self.prog.split(), *self._words[self._words.index(word) :]]
        answer = instead(typed, name=len(self.prog.split()) + 1)
        self.error(f"unknown command {word!r}; {_hint(word, known) if answer is None else f'write: {answer}'}")

    def _misspelt_option(self) -> str | None:
        """Return the first unknown argument in the form of an option; None if a subcommand owns the arguments."""
        if self._subparsers is not None:
            return None
        options = itertools.takewhile(lambda word: word != "--", self._words)
        names = (word.partition("=")[0] for word in options if word.startswith("--"))
        return next((name for name in names if name not in self._option_string_actions), None)

    def _refusal(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument {word!r}"
        option = word.partition("=")[0]
        if any(action.nargs == argparse.REMAINDER for action in self._get_positional_actions()):
            return f"{option} is no option of {self.prog}; write: {self.prog} -- {shlex.join(self._words)}"
        return f"unknown option {option}; {_hint(option, self._option_string_actions)}"


class RenamedOption(argparse.Action):
    """The former spelling of an option: refused with the new one, which is the value of `const`."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Exit with code 2 and a message that names the new option."""
        parser.error(f"{self.option_strings[0]} is named {self.const} now")


def add_renamed_option(parser: argparse.ArgumentParser, old: str, new: str) -> None:
    """Answer an option's former spelling with the new one; help and completion do not list it."""
    parser.add_argument(old, action=RenamedOption, const=new, nargs="?", dest=argparse.SUPPRESS, help=argparse.SUPPRESS)


class RootParser(CommandParser):
    """Parser of the whole command; its help lists the subcommands under their part."""

    def __init__(self, **keywords: Any) -> None:  # noqa: ANN401
        super().__init__(**keywords)
        self._sections: list[tuple[str, list[str]]] = []
        self._absent: dict[str, str] = {}
        self.commands: argparse._SubParsersAction[CommandParser] = self.add_subparsers(
            dest="command", metavar="COMMAND", parser_class=CommandParser
        )

    def add_section(self, title: str, names: Iterable[str]) -> None:
        """Add a section with these subcommands to the help."""
        self._sections.append((title, list(names)))

    def add_absent(self, names: Iterable[str], reason: str) -> None:
        """Register subcommands that fail with the reason why they are not installed."""
        self._absent.update(dict.fromkeys(names, reason))

    def format_help(self) -> str:
        """Format usage, description, commands by section, options, examples."""
        formatter = self._get_formatter()
        formatter.add_usage(f"{self.prog} COMMAND ...", [], [], "usage: ")
        formatter.add_text(self.description)
        listed = {action.dest: action for action in self.commands._get_subactions()}
        for title, names in self._sections:
            formatter.start_section(title)
            formatter.add_arguments([listed[name] for name in names if name in listed])
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments(self._optionals._group_actions)
        formatter.end_section()
        for reason in dict.fromkeys(self._absent.values()):
            formatter.add_text(f"note: {reason}")
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def _unknown_command(self, word: str, known: Iterable[str]) -> NoReturn:
        if word in self._absent:
            self.error(f"{word!r} is not available: {self._absent[word]}")
        super()._unknown_command(word, [*known, *self._absent])


def _hint(word: str, known: Iterable[str]) -> str:
    names = list(known)
    nearest = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if nearest:
        return f"did you mean {nearest[0]}?"
    return f"known: {', '.join(names)}" if len(names) <= LISTED_NAMES else "it is not near any known one"
