"""Generated histories of the plan in a small cluster: every promise holds, and every job reaches its end.

`make fuzz` plays 50,000 of them. That they can fail is shown by plans that lack one of their policies.
"""

import random

import pytest
from plan_fuzz.history import play
from plan_fuzz.promises import Broken

from megatronapp_operator.plan import planner

HISTORIES = 60
MOST = 1500
"""Histories until a plan without one of its policies is found out."""
BEGIN = {"gathering": 600}
"""First history where few of the earlier ones need the policy; only one in several hundred needs that of gathering."""
FIRST = random.SystemRandom().randrange(2**32)
"""Each run plays other histories; a broken promise names its seed."""
POLICIES = {policy.__name__: policy for policy in planner.POLICIES}
FOUND_OUT = (
    "active", "clear_stale", "create", "created", "delete_job", "ensure_hub", "finish_failing", "gathering",
    "guard_terminal", "initialize", "judge_end", "judge_lost_node", "judge_missing", "judge_refusal", "judge_start",
    "judge_success", "progress", "resume", "running", "suspend",
)  # fmt: skip
"""Policies of clusters that few histories need. `judge_change`, `slow_nodes` and `exclusion.readmit` take a thousand
(`make fuzz`)."""


def test_promises_hold_in_generated_histories() -> None:
    for seed in range(FIRST, FIRST + HISTORIES):
        play(seed)


@pytest.mark.full("cases that differ in the policy", but=("create", "delete_job", "judge_end", "resume"))
@pytest.mark.parametrize("name", FOUND_OUT)
def test_a_plan_without_any_of_its_policies_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        planner, "POLICIES", tuple(policy for policy in planner.POLICIES if policy is not POLICIES[name])
    )
    assert found_out(BEGIN.get(name, 0))


def found_out(first: int) -> bool:
    for seed in range(first, first + MOST):
        try:
            play(seed)
        except Broken:
            return True
    return False
