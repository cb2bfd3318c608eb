"""Examples of the rules about evictions."""

from rule_example import Changes, Example, bad, good
from rule_examples_serve import SERVED

_PROTECT: Changes = {"spec.runPolicy": {"disruption": "Protect"}}
_FIRST: Changes = {"spec.runPolicy": {"disruption": "CheckpointFirst"}}
_VOLUME: Changes = {"spec.checkpoint.volume": {"claim": "runs", "mountPath": "/checkpoints"}}
_SLASH: Changes = {"spec.checkpoint.volume": {"claim": "runs", "mountPath": "/checkpoints/"}}
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
    *good("checkpoints-outlive-nodes", _FIRST | _SAVES | _VOLUME, _PROTECT | _SAVES, _FIRST | _SAVES | _SLASH),
    *bad(
        "checkpoints-outlive-nodes",
        "spec.checkpoint.save",
        (_FIRST | {"spec.checkpoint": {"save": "/tmp/run", "saveInterval": 10}}, "is not below the mountPath"),
        (_FIRST | {"spec.checkpoint": {"save": "run", "saveInterval": 10}} | _VOLUME, "is lost with its pod"),
        (_FIRST | {"spec.checkpoint": {"save": "/checkpoint/run", "saveInterval": 10}} | _VOLUME, "/checkpoint/run is"),
        (_FIRST | {"spec.checkpoint": {"save": "/checkpoints2", "saveInterval": 10}} | _VOLUME, "/checkpoints2 is"),
    ),
)
