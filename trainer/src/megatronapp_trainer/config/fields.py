"""Conversion between fields of the configuration and flags of the command line."""

import argparse
import dataclasses
import math
import types
import typing
from collections.abc import Generator, Iterator
from typing import Any, NoReturn, TypeVar

from megatronapp_trainer.errors import UsageError

T = TypeVar("T")
_KEY = "option"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """Settings of the parser for a field beyond its name, type and default."""

    help: str
    flag: str | None = None
    choices: tuple[str, ...] | None = None
    turns_off: bool = False
    aliases: tuple[str, ...] = ()
    bounds: str | None = None
    """Interval of all valid values, such as `[0, 1)`: 0 belongs to it, 1 does not. `inf` is no bound."""


def option(
    default: T,
    help: str,
    *,
    flag: str | None = None,
    choices: tuple[str, ...] | None = None,
    aliases: tuple[str, ...] = (),
    bounds: str | None = None,
) -> T:
    """Declare a field with a flag. Without ``flag`` the field's name is its spelling: ``num_layers`` is
    ``--num-layers``.
    """
    meta = Option(help=help, flag=flag, choices=choices, aliases=aliases, bounds=bounds)
    field: T = dataclasses.field(default=default, metadata={_KEY: meta})
    return field


def turned_off_by(flag: str, help: str) -> bool:
    """Declare a field that is true until Megatron's negative flag turns it off, such as ``--no-save-rng``."""
    field: bool = dataclasses.field(default=True, metadata={_KEY: Option(help=help, flag=flag, turns_off=True)})
    return field


def option_of(field: "dataclasses.Field[Any]") -> Option:
    """Return the option of a field that ``option`` or ``turned_off_by`` made."""
    meta: Option = field.metadata[_KEY]
    return meta


def flag_of(field: "dataclasses.Field[Any]") -> str:
    """Return the flag that sets this field."""
    return option_of(field).flag or "--" + field.name.replace("_", "-")


def require(condition: bool, message: str) -> Generator[str, None, bool]:
    """Yield the message unless the condition holds; return whether it holds."""
    if not condition:
        yield message
    return condition


def out_of_bounds(section: Any) -> Iterator[str]:  # noqa: ANN401 - a dataclass of options
    """Yield a sentence for each number of the section outside its option's bounds."""
    for field in dataclasses.fields(section):
        value, bounds = getattr(section, field.name), option_of(field).bounds
        if value is not None and bounds is not None:
            yield from require(*_within(bounds, value, flag_of(field)))


def _within(bounds: str, value: float, flag: str) -> tuple[bool, str]:
    """Compare a value with its bounds; return the result and the sentence for a failure."""
    least, most = (float(bound) for bound in bounds[1:-1].split(","))
    descriptions = [f"{least:g} or more" if bounds[0] == "[" else f"above {least:g}"]
    if not math.isinf(most):
        descriptions.append(f"{most:.0f} or less" if bounds[-1] == "]" else f"below {most:g}")
    above = value >= least if bounds[0] == "[" else value > least
    below = value <= most if bounds[-1] == "]" else value < most
    return above and below, f"{flag} {value} must be {' and '.join(descriptions)}"


class StrictParser(argparse.ArgumentParser):
    """A parser that raises UsageError instead of ending the process, and accepts no abbreviations."""

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
    """Return the section's values of a parsed command line."""
    values = {field.name: getattr(namespace, field.name) for field in dataclasses.fields(typing.cast("Any", section))}
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return section(**{**values, **lists})


def _keywords(hint: Any, meta: Option) -> dict[str, Any]:  # noqa: ANN401
    """Return the arguments of ``add_argument`` for a field of this type."""
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if hint is bool:
        return {"action": "store_false" if meta.turns_off else "store_true"}
    if typing.get_origin(hint) is tuple:
        return {"nargs": "+", "type": typing.get_args(hint)[0], "choices": meta.choices}
    return {"type": _finite if hint is float else hint, "choices": meta.choices}


def _finite(text: str) -> float:
    """Parse a number that is neither NaN nor infinite: no rule could judge those."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid float value: {text!r}") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return value
