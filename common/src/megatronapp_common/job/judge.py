"""Evaluation of the rules of a MegatronJob, with the same results as the API server."""

import functools
import math
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cel_expr_python import cel
from cel_expr_python.ext import ext_strings

from megatronapp_common.job.admission import ADMISSION_RULES, JUDGED_MERGED
from megatronapp_common.job.api.quantity import quantity_value
from megatronapp_common.job.api.spec import Spec
from megatronapp_common.job.rules import CHANGE_RULES, SPEC_RULES, Rule
from megatronapp_common.job.rules.rule import OPTIONAL_BLOCKS

Path = tuple[str, ...]
_LARGEST_FLOAT = int(sys.float_info.max)
_RESERVED = re.compile(r"\b__(in)__\b")
"""Spelling in CEL of a field whose name is reserved there."""
_GUARD = re.compile(r"!has\(self\.(?:" + "|".join(OPTIONAL_BLOCKS) + r")\) \|\| ")
"""Prefix that `where_given` adds to a rule: it reads only whether a block is present."""
_MENTION = re.compile(r"\b(?:self|object\.spec)((?:\.\w+)+)")


def find_problems(spec: Mapping[str, Any], unknown: Collection[Path] = (), *, merged: bool = False) -> list[str]:
    """Return all problems between the fields of a spec (`Spec.to_dict`), a line each: path, problem, correction.

    Rules that read an unknown field, a field below one or a block that contains one are not judged. Of a spec that
    names a profile, those of the schema are judged only once it is `merged` with the profile.
    """
    return [text for _, text in broken_rules(spec, unknown, merged=merged)]


def broken_rules(
    spec: Mapping[str, Any], unknown: Collection[Path] = (), *, merged: bool = False
) -> list[tuple[Rule, str]]:
    """Return the problems as `find_problems` does, each with the rule that the spec breaks."""
    is_whole = merged or spec.get("profile") is None
    known = [rule for rule in SPEC_RULES if is_whole and not _depends_on(rule, unknown)]
    admitted = [
        rule
        for rule in ADMISSION_RULES
        if (is_whole or rule.id not in JUDGED_MERGED) and not _depends_on(rule, unknown)
    ]
    judged = {name: value for name, value in spec.items() if name != "profile"} if merged else spec
    return _broken(known, {"self": spec}) + _broken(admitted, {"object": {"spec": judged}}, refuse_errors=True)


def check_update(old: Spec, new: Spec) -> list[str]:
    """Return forbidden changes from a job's old spec to its new one, a line each. Both must be valid by themselves."""
    return evaluate_rules(CHANGE_RULES, {"self": new.to_dict(), "oldSelf": old.to_dict()})


def evaluate_rules(rules: Sequence[Rule], data: Mapping[str, Any]) -> list[str]:
    """Return the problems of these rules in data, which holds `self` and, for rules about changes, `oldSelf`."""
    return [text for _, text in _broken(rules, data)]


def _broken(rules: Sequence[Rule], data: Mapping[str, Any], *, refuse_errors: bool = False) -> list[tuple[Rule, str]]:
    """Return the rules that data breaks, each with its message.

    `refuse_errors` is for data without types (`object`): a rule that cannot be evaluated on it is broken.
    """
    activation = _environment().Activation(data=_in_64_bits(data))
    found = []
    for rule in rules:
        holds = _evaluate(rule.rule, activation)
        assert holds is not None or refuse_errors, f"rule {rule.id} gives neither yes nor no"
        if not holds:
            said = (
                _evaluate(rule.message_expression, activation)
                if rule.message_expression and holds is not None
                else None
            )
            found.append((rule, f"spec{rule.field}: {rule.message if said is None else said}"))
    return found


def _in_64_bits(value: Any) -> Any:  # noqa: ANN401 - plain data
    """Convert whole numbers beyond CEL's 64 bits to floating point, as the API server does."""
    if isinstance(value, Mapping):
        return {key: _in_64_bits(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_in_64_bits(item) for item in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return math.inf if abs(value) > _LARGEST_FLOAT else float(value)
    return value


def _evaluate(text: str, activation: Any) -> Any:  # noqa: ANN401 - an Activation; bool or text
    """Return the value of a text; None where it cannot be evaluated."""
    value = _compiled(text).eval(activation)
    return None if value.type() == cel.Type.ERROR else value.plain_value()


@functools.cache
def _environment() -> Any:  # noqa: ANN401 - the library has no types
    variables = {"self": cel.Type.DYN, "oldSelf": cel.Type.DYN, "object": cel.Type.DYN}
    return cel.NewEnv(variables=variables, extensions=[ext_strings.ExtStrings()], functions=_quantities())


def _quantities() -> list[Any]:
    """Return the API server's functions of quantities; here a quantity is its text."""
    text, verdict, number = cel.Type.STRING, cel.Type.BOOL, cel.Type.DOUBLE
    compare = {
        "isLessThan": lambda left, right: quantity_value(left) < quantity_value(right),
        "isGreaterThan": lambda left, right: quantity_value(left) > quantity_value(right),
    }
    return [
        cel.FunctionDecl("quantity", [cel.Overload("quantity", text, [text], False, lambda written: written)]),
        cel.FunctionDecl(
            "asApproximateFloat",
            [cel.Overload("asApproximateFloat", number, [text], True, lambda value: float(quantity_value(value)))],
        ),
        *(
            cel.FunctionDecl(name, [cel.Overload(name, verdict, [text, text], True, call)])
            for name, call in compare.items()
        ),
    ]


@functools.cache
def _compiled(text: str) -> Any:  # noqa: ANN401 - the library has no types
    return _environment().compile(_RESERVED.sub(r"`\1`", text))


def _depends_on(rule: Rule, unknown: Collection[Path]) -> bool:
    return any(path[: len(mention)] == mention[: len(path)] for path in unknown for mention in fields_mentioned(rule))


@functools.cache
def fields_mentioned(rule: Rule) -> frozenset[Path]:
    """Return the paths below the spec that a rule or its message reads; a method called on one ends it."""
    return frozenset(
        tuple(path.removeprefix(".").split("."))
        for path in _MENTION.findall(_GUARD.sub("", rule.rule) + rule.message_expression)
    )
