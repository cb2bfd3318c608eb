"""A parser that names the nearest word for what it does not know, and a root that lists commands by part."""

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
"""Function of the bash completion that gives the names of jobs; a part names it in the `complete` of an argument."""
_REQUIRED = ("the following arguments are required", "one of the arguments")
"""How argparse begins to say what is missing."""


class CommandParser(argparse.ArgumentParser):
    """The parser of a command and all below it: no abbreviations, texts as they are written, near names on a slip."""

    def __init__(self, **keywords: Any) -> None:  # noqa: ANN401
        keywords.setdefault("allow_abbrev", False)
        keywords.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**keywords)
        self._words: list[str] = []

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse, and refuse what is left over here, where the command's own options are known."""
        self._words = list(args or ())
        values, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._refusal(unknown[0]))
        assert isinstance(values, argparse.Namespace)
        return values, []

    def error(self, message: str) -> NoReturn:
        """Print the message and where to read on to stderr; exit code 2."""
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
        """The first word that looks like an option and is none; None where a subcommand owns the words."""
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


class RootParser(CommandParser):
    """The parser of the whole command; its help lists the subcommands under the part that they come from."""

    def __init__(self, **keywords: Any) -> None:  # noqa: ANN401
        super().__init__(**keywords)
        self._sections: list[tuple[str, list[str]]] = []
        self._absent: dict[str, str] = {}
        self.commands: argparse._SubParsersAction[CommandParser] = self.add_subparsers(
            dest="command", metavar="COMMAND", parser_class=CommandParser
        )

    def add_section(self, title: str, names: Iterable[str]) -> None:
        """List these subcommands under a title."""
        self._sections.append((title, list(names)))

    def add_absent(self, names: Iterable[str], reason: str) -> None:
        """Answer these subcommands with the reason why they are not there."""
        self._absent.update(dict.fromkeys(names, reason))

    def format_help(self) -> str:
        """Usage, description, commands by section, options, examples."""
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
