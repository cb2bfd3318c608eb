"""Examples of the rules about evictions."""

from rule_example import Changes, Example, bad, good
from rule_examples_serve import SERVED

_PROTECT: Changes = {"spec.runPolicy": {"disruption": "Protect"}}
_FIRST: Changes = {"spec.runPolicy": {"disruption": "CheckpointFirst"}}
_VOLUME: Changes = {"spec.checkpoint.volume": {"claim": "runs", "mountPath": "/checkpoints"}}
_SAVES: Changes = {"spec.checkpoint": {"save": "/checkpoints/run", "saveInterval": 10}}

DISRUPTION_EXAMPLES: tuple[Example, ...] = (
    *good("checkpoint-first-saves", _FIRST | _SAVES | _VOLUME, _PROTECT),
    *bad(
        "checkpoint-first-saves",
        "spec.runPolicy.disruption",
        (_FIRST | _VOLUME, "needs mode: train, checkpoint.save and checkpoint.saveInterval"),
        (_FIRST | {"spec.checkpoint": {"save": "/checkpoints/run"}} | _VOLUME, "write Protect where nothing is saved"),
        (SERVED | _FIRST | _VOLUME, "needs mode: train"),
    ),
    *good("checkpoint-first-keeps-checkpoints", _FIRST | _SAVES | _VOLUME, _PROTECT | _SAVES),
    *bad(
        "checkpoint-first-keeps-checkpoints",
        "spec.runPolicy.disruption",
        (_FIRST | {"spec.checkpoint": {"save": "/tmp/run", "saveInterval": 10}}, "needs checkpoint.volume"),
    ),
)
