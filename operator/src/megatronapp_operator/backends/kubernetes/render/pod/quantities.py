"""Sums of the resource requests of pods."""

import fractions
import math
from collections.abc import Iterable, Mapping

from megatronapp_common.job.api.quantity import quantity_value
from megatronapp_operator.backends.kubernetes.client.resources import Object

Amounts = dict[str, fractions.Fraction]


def text_of(value: fractions.Fraction) -> str:
    """Format a quantity: an integer, or in thousandths, rounded up."""
    return str(value.numerator) if value.denominator == 1 else f"{math.ceil(value * 1000)}m"


def requests_of(container: Object) -> Amounts:
    """Return the requests of a container; a limit without a request is one, too."""
    resources = container.get("resources") or {}
    requested = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: quantity_value(str(text)) for name, text in requested.items()}


def pod_requests(spec: Object) -> Amounts:
    """Return the requests of a pod for the scheduler: all containers, or one init container if that is more."""
    total = _sum(map(requests_of, spec["containers"]))
    for container in spec.get("initContainers") or ():
        for name, value in requests_of(container).items():
            total[name] = max(total.get(name, fractions.Fraction(0)), value)
    return total


def gang_requests(pods: Iterable[tuple[Object, int]]) -> dict[str, str]:
    """Return the requests of pods together, as quantities; each pod has a count."""
    requested = [{name: value * count for name, value in pod_requests(spec).items()} for spec, count in pods]
    return {name: text_of(value) for name, value in sorted(_sum(requested).items())}


def _sum(parts: Iterable[Mapping[str, fractions.Fraction]]) -> Amounts:
    total: Amounts = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, fractions.Fraction(0)) + value
    return total
