"""Rules about changes while a job exists, over `oldSelf` and `self`.

They belong to the spec, not to the fields: there a rule would be skipped when its field appears or is removed.
"""

from megatronapp_common.job.rules.rule import Rule, cel_message


def _same(field: str) -> str:
    return f"(has(self{field}) == has(oldSelf{field}) && (!has(self{field}) || self{field} == oldSelf{field}))"


def _shown(root: str, field: str) -> str:
    return f"has({root}{field}) ? string({root}{field}) : 'omitted'"


def _while_suspended(rule_id: str, field: str, *, block: str = "") -> Rule:
    """Return the rule that a number may only be added, changed or removed in a job that was suspended before.

    `block` contains it and is optional.
    """
    absent = f"!has(self{block}) || !has(oldSelf{block}) || " if block else ""
    return Rule(
        id=rule_id,
        field=field,
        rule=f"{absent}oldSelf.suspend || {_same(field)}",
        message="may change only while the job is suspended; set suspend: true first",
        message_expression=cel_message(
            f"was {{{_shown('oldSelf', field)}}} and is now {{{_shown('self', field)}}}; "
            f"it may change only while the job is suspended: set suspend: true first"
        ),
    )


def _never(rule_id: str, field: str, why: str) -> Rule:
    """Return the rule that a field is immutable, also where it is absent."""
    return Rule(
        id=rule_id,
        field=field,
        rule=_same(field),
        message=f"cannot change{why}; make a new job",
        message_expression=cel_message(
            f"was {{{_shown('oldSelf', field)}}} and is now {{{_shown('self', field)}}}; "
            f"it cannot change{why}: make a new job"
        ),
    )


CHANGE_RULES = (
    Rule(
        id="mode-stays",
        field=".mode",
        rule="self.mode == oldSelf.mode",
        message="cannot change; make a new job",
    ),
    Rule(
        id="model-stays",
        field=".model",
        rule=_same(".model"),
        message="cannot change, as checkpoints hold the old shape; make a new job",
    ),
    _while_suspended("nodes-stay", ".nodes"),
    _while_suspended("ranks-stay", ".procPerNode"),
    _while_suspended("gpus-stay", ".gpusPerNode"),
    Rule(
        id="layout-stays",
        field=".parallelism",
        rule="oldSelf.suspend || self.parallelism == oldSelf.parallelism",
        message="may change only while the job is suspended; set suspend: true first",
    ),
    _while_suspended("chunks-stay", ".dpp.chunks"),
    Rule(
        id="fbd-stays",
        field=".fbd",
        rule="oldSelf.suspend || self.fbd == oldSelf.fbd",
        message="may change only while the job is suspended; set suspend: true first",
    ),
    _never("gang-stays", ".scheduling.gang", ", as pods may be in its queue"),
    _never("manager-stays", ".managedBy", ", as two controllers would fight for the job"),
    _while_suspended("batch-stays", ".training.globalBatchSize", block=".training"),
)
