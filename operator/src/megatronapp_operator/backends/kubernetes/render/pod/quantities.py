"""Sums of what pods ask for."""

import fractions
import math
from collections.abc import Iterable, Mapping

from megatronapp_common.job.api.quantity import quantity_value
from megatronapp_operator.backends.kubernetes.client.api import Object

Amounts = dict[str, fractions.Fraction]


def text_of(value: fractions.Fraction) -> str:
    """A quantity: whole, else in thousandths, rounded up."""
    return str(value.numerator) if value.denominator == 1 else f"{math.ceil(value * 1000)}m"


def requests_of(container: Object) -> Amounts:
    """What a container asks for; a limit alone is a request, too."""
    resources = container.get("resources") or {}
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: quantity_value(str(text)) for name, text in asked.items()}


def pod_requests(spec: Object) -> Amounts:
    """What the scheduler sets aside for a pod: its containers together, or one init container if that is more."""
    total = _sum(map(requests_of, spec["containers"]))
    for container in spec.get("initContainers") or ():
        for name, value in requests_of(container).items():
            total[name] = max(total.get(name, fractions.Fraction(0)), value)
    return total


def gang_requests(pods: Iterable[tuple[Object, int]]) -> dict[str, str]:
    """What pods ask for together, as quantities; each with how many there are of it."""
    asked = [{name: value * count for name, value in pod_requests(spec).items()} for spec, count in pods]
    return {name: text_of(value) for name, value in sorted(_sum(asked).items())}


def _sum(parts: Iterable[Mapping[str, fractions.Fraction]]) -> Amounts:
    total: Amounts = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, fractions.Fraction(0)) + value
    return total
