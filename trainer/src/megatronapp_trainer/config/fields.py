"""How a field of the configuration becomes a flag, and a command line becomes the configuration."""

import argparse
import dataclasses
import types
import typing
from typing import Any, NoReturn, TypeVar

from megatronapp_trainer.errors import UsageError

T = TypeVar("T")
_KEY = "option"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """What the parser needs to know of a field beyond its name, type and default."""

    help: str
    flag: str | None = None
    choices: tuple[str, ...] | None = None
    turns_off: bool = False
    aliases: tuple[str, ...] = ()


def option(
    default: T,
    help: str,
    *,
    flag: str | None = None,
    choices: tuple[str, ...] | None = None,
    aliases: tuple[str, ...] = (),
) -> T:
    """A field with a flag. Without ``flag`` the field's name is its spelling: ``num_layers`` is ``--num-layers``."""
    meta = Option(help=help, flag=flag, choices=choices, aliases=aliases)
    field: T = dataclasses.field(default=default, metadata={_KEY: meta})
    return field


def turned_off_by(flag: str, help: str) -> bool:
    """A field that is true until Megatron's negative flag turns it off, such as ``--no-save-rng``."""
    field: bool = dataclasses.field(default=True, metadata={_KEY: Option(help=help, flag=flag, turns_off=True)})
    return field


def option_of(field: "dataclasses.Field[Any]") -> Option:
    """The option of a field that ``option`` or ``turned_off_by`` made."""
    meta: Option = field.metadata[_KEY]
    return meta


def flag_of(field: "dataclasses.Field[Any]") -> str:
    """The flag that sets this field."""
    return option_of(field).flag or "--" + field.name.replace("_", "-")


class RefusingParser(argparse.ArgumentParser):
    """A parser that raises UsageError instead of ending the process, and takes no abbreviations."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        raise UsageError(message)


def add_section(parser: argparse.ArgumentParser, section: type) -> None:
    """Add the flags of one dataclass under its docstring's first line as the heading."""
    group = parser.add_argument_group((section.__doc__ or section.__name__).splitlines()[0].rstrip("."))
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        meta = option_of(field)
        keywords = _keywords(hints[field.name], meta)
        group.add_argument(
            flag_of(field), *meta.aliases, dest=field.name, default=field.default, help=meta.help, **keywords
        )


def read_section(section: type[T], namespace: argparse.Namespace) -> T:
    """The section's values out of a parsed command line."""
    values = {field.name: getattr(namespace, field.name) for field in dataclasses.fields(typing.cast("Any", section))}
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return section(**{**values, **lists})


def _keywords(hint: Any, meta: Option) -> dict[str, Any]:  # noqa: ANN401
    """Arguments of ``add_argument`` for a field of this type."""
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if hint is bool:
        return {"action": "store_false" if meta.turns_off else "store_true"}
    if typing.get_origin(hint) is tuple:
        return {"nargs": "+", "type": typing.get_args(hint)[0]}
    return {"type": hint, "choices": meta.choices}
