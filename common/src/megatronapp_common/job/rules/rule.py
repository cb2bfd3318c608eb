"""The type of a rule, and helpers for CEL text that rules share.

All texts are limited to what the API server's CEL and the local one have in common: the standard operators and macros,
and `format` of the strings extension. `format` builds the messages because the API server cannot bound the cost of
`'...' + string(x)` and refuses it. Names are bound by `[value].all(name, ...)`, as neither side has `cel.bind`.
"""

import dataclasses
import re

_VALUE = re.compile(r"\{([^{}]*)\}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A condition that must be true. It reads optional fields only after `has`, and never divides by zero.

    It passes where another rule already refuses a field that it depends on, so that one mistake gives one message.
    """

    id: str
    """Stable name, for tests."""
    field: str
    """Field of the message, as a path below the node: `.model.hiddenSize`; "" for the node itself."""
    rule: str
    """CEL over `self`; for a rule about a change also over `oldSelf`. True if the rule holds."""
    message: str
    """Problem and correction, in a message that is valid for all values."""
    message_expression: str = ""
    """The same in CEL, with the values; "" if `message` needs none."""
    args: tuple[str, ...] = ()
    """Flags that `spec.args` may contain instead of a field, and on which the rule depends: with one of them the rule
    passes, and the trainer's own check of the whole command line decides."""
    in_schema: bool = False
    """True if the API server enforces it by the schema itself (such as unique keys of a list): judged locally only."""


OPTIONAL_BLOCKS = ("model", "training")
"""Blocks of the spec without a default: required in one mode and absent in the other."""


def where_given(rule: Rule) -> Rule:
    """Return the rule, passing where a block that it reads is absent, or where `spec.args` decide (`Rule.args`)."""
    blocks = [block for block in OPTIONAL_BLOCKS if f"self.{block}." in rule.rule + rule.message_expression]
    guard = "".join(f"!has(self.{block}) || " for block in blocks)
    guard += f"{_given(rule.args)} || " if rule.args else ""
    return dataclasses.replace(rule, rule=f"{guard}({rule.rule})") if guard else rule


def _given(flags: tuple[str, ...]) -> str:
    """Return CEL text: `spec.args` contains one of these flags, as `--flag` or `--flag=value`."""
    words = ", ".join(f"'{flag}'" for flag in flags)
    return f"self.args.exists(word, [{words}].exists(flag, word == flag || word.startsWith(flag + '=')))"


def at_admission(rule: Rule) -> Rule:
    """Return a rule over `self`, the spec, as the admission policy has it: over `object`, the whole job.

    It passes where the job names a profile: the operator judges the merged spec.
    """

    def over_object(text: str) -> str:
        return re.sub(r"\bself\b", "object.spec", text)

    return dataclasses.replace(
        rule,
        rule=f"has(object.spec.profile) || ({over_object(rule.rule)})",
        message_expression=over_object(rule.message_expression),
    )


def cel_message(template: str) -> str:
    """Return CEL text of a message in which `{expression}` is replaced by its value."""
    literal = _VALUE.sub("%s", template).replace("\\", "\\\\").replace("'", "\\'")
    values = ", ".join(f"string({value})" for value in _VALUE.findall(template))
    return f"'{literal}'.format([{values}])"


def let(name: str, value: str, rule: str) -> str:
    """Return CEL text of a rule with a name bound to a value."""
    return f"[{value}].all({name}, {rule})"


def cel_message_with(name: str, value: str, message: str) -> str:
    """Return CEL text of a message with a name bound to a value."""
    return f"[{value}].map({name}, {message})[0]"


def no_item(items: str, name: str, wrong: str) -> str:
    """Return CEL text: no item of a list, called `name`, is wrong."""
    return f"!{items}.exists({name}, {wrong})"


def first_item(items: str, name: str, wrong: str, template: str) -> str:
    """Return CEL text of a message (`cel_message`) about the first item that is wrong; it counts the others."""
    found = f"{items}.filter({name}, {wrong})"
    others = f"{found}.size() > 1 ? {cel_message(f' (and {{{found}.size() - 1}} more)')} : ''"
    first = f"{found}.map({name}, {cel_message(template)})[0]"
    return cel_message(f"{{{first}}}{{{others}}}")


def nearest_multiple(value: str, factor: str) -> str:
    """Return CEL text of the multiple of `factor` that is nearest to `value`, at least `factor`."""
    return f"({value} + {factor} / 2 < {factor} ? {factor} : ({value} + {factor} / 2) / {factor} * {factor})"


def multiple(
    rule_id: str,
    field: str,
    *,
    value: str,
    factor: str,
    named: str,
    unless: str = "",
    why: str = "",
    else_: str = "",
    args: tuple[str, ...] = (),
) -> Rule:
    """Return the rule that a value is a multiple of another field; `unless` is CEL text of exceptions."""
    guard = f"{unless} || " if unless else ""
    return Rule(
        id=rule_id,
        field=field,
        rule=f"{guard}{value} % {factor} == 0",
        message=f"must be a multiple of {named}{why}{else_}",
        message_expression=cel_message(
            f"{{{value}}} is not a multiple of {named} {{{factor}}}{why}; "
            f"write {{{nearest_multiple(value, factor)}}}{else_}"
        ),
        args=args,
    )
