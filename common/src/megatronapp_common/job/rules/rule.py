"""One rule, and the pieces of CEL text that rules share.

All texts keep to what the API server's CEL and the local one have in common: the standard operators and macros, and
`format` of the strings extension. `format` builds the messages because the API server cannot bound the cost of
`'...' + string(x)` and refuses it. Names are bound by `[value].all(name, ...)`, as neither side has `cel.bind`.
"""

import dataclasses
import re

_VALUE = re.compile(r"\{([^{}]*)\}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What must be true. A rule looks at fields that are left out only behind `has`, and never divides by zero.

    It stays silent where another rule already refuses what it builds on, so that one mistake gives one message.
    """

    id: str
    """Its name in tests; stable."""
    field: str
    """Whom the message is about, as a path below the node: `.model.hiddenSize`; "": the node itself."""
    rule: str
    """CEL over `self`; for a rule about a change also over `oldSelf`. True: all is well."""
    message: str
    """What is wrong and what to write instead, in words that hold for all values."""
    message_expression: str = ""
    """The same in CEL, with the values; "": `says` needs none."""
    args: tuple[str, ...] = ()
    """Flags that `spec.args` may give instead of a field, and on which the rule depends: with one of them the rule is
    silent, and the trainer's own check of the whole command line decides."""
    in_schema: bool = False
    """The API server knows it by the schema itself (such as unique keys of a list): the rule is only for this side."""


OPTIONAL_BLOCKS = ("model", "training")
"""Blocks of the spec without a default: one mode needs them, the other does without."""


def where_given(rule: Rule) -> Rule:
    """The rule, silent where a block is omitted whose fields it reads, or where `spec.args` decide (`Rule.args`)."""
    blocks = [block for block in OPTIONAL_BLOCKS if f"self.{block}." in rule.rule + rule.message_expression]
    guard = "".join(f"!has(self.{block}) || " for block in blocks)
    guard += f"{_given(rule.args)} || " if rule.args else ""
    return dataclasses.replace(rule, rule=f"{guard}({rule.rule})") if guard else rule


def _given(flags: tuple[str, ...]) -> str:
    """CEL text: `spec.args` hold one of these flags, as `--flag` or `--flag=value`."""
    words = ", ".join(f"'{flag}'" for flag in flags)
    return f"self.args.exists(word, word in [{words}] || [{words}].exists(flag, word.startsWith(flag + '=')))"


def cel_message(template: str) -> str:
    """CEL text of a message in which `{expression}` stands for its value."""
    literal = _VALUE.sub("%s", template).replace("\\", "\\\\").replace("'", "\\'")
    values = ", ".join(f"string({value})" for value in _VALUE.findall(template))
    return f"'{literal}'.format([{values}])"


def let(name: str, value: str, rule: str) -> str:
    """CEL text of a rule in which a name stands for a value."""
    return f"[{value}].all({name}, {rule})"


def cel_message_with(name: str, value: str, message: str) -> str:
    """CEL text of a message in which a name stands for a value."""
    return f"[{value}].map({name}, {message})[0]"


def no_item(items: str, name: str, wrong: str) -> str:
    """CEL text: no item of a list, called `name`, is wrong."""
    return f"!{items}.exists({name}, {wrong})"


def first_item(items: str, name: str, wrong: str, template: str) -> str:
    """CEL text of a message (`cel_message`) about the first item that is wrong; it counts the others."""
    found = f"{items}.filter({name}, {wrong})"
    others = f"{found}.size() > 1 ? {cel_message(f' (and {{{found}.size() - 1}} more)')} : ''"
    first = f"{found}.map({name}, {cel_message(template)})[0]"
    return cel_message(f"{{{first}}}{{{others}}}")


def nearest_multiple(value: str, factor: str) -> str:
    """CEL text of the multiple of `factor` that is nearest to `value`, at least `factor`."""
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
    """The rule that a value is a multiple of another field; `unless` is CEL text of when that does not matter."""
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
