"""The keys of an installation: reading them, rotating them, and what the plan makes of a job that refuses ours."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from megatronapp_operator.errors import SettingsError
from megatronapp_operator.keys import KeyRing, key_id
from megatronapp_operator.plan import ConditionType, Hub, HubPhase, RecordEvent

OLD, NEW = "ab" * 32, "cd" * 32
DAY_S = 24 * 3600


@pytest.mark.parametrize("content", [None, "", "\n", "ab", "zz" * 32, "AB" * 32, f"{NEW}\nab", "\xe4" * 64])
def test_a_file_without_keys_is_refused_with_what_to_write(tmp_path: pathlib.Path, content: str | None) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(SettingsError, match=r"--key-file .*openssl rand -hex 32"):
        KeyRing.read(path)


def test_a_new_key_in_front_of_the_old_one_is_current_and_the_old_one_is_still_found(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "key"
    path.write_text(OLD, encoding="ascii")
    ring = KeyRing.read(path)
    assert (ring.current, ring.find(""), ring.find(key_id(NEW))) == (OLD, OLD, None)
    path.write_text(f"{NEW}\n{OLD}\n", encoding="ascii")
    assert ring.reload() and not ring.reload()
    assert (ring.current, ring.current_id, ring.find(key_id(OLD))) == (NEW, key_id(NEW), OLD)
    assert ring.find("") == OLD, "attempts of releases that had one key have the oldest"
    assert key_id(OLD) not in OLD


def test_a_file_that_became_unreadable_changes_nothing(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "key"
    path.write_text(OLD, encoding="ascii")
    ring = KeyRing.read(path)
    path.write_text("half", encoding="ascii")
    assert not ring.reload()
    path.unlink()
    assert not ring.reload()
    assert ring.values == (OLD,)


def told(made: Any) -> list[str]:
    return [one.reason for one in made.actions if isinstance(one, RecordEvent)]


@pytest.mark.parametrize("policy", [{"progress_deadline_s": 1800}, {"start_deadline_s": 900}])
def test_a_gang_that_refuses_our_token_is_never_restarted_for_it(
    running: Callable[..., Any], policy: dict[str, float]
) -> None:
    made = running(**policy, max_restarts=3)
    made.spec(hub=True)
    made.see(*made.observed.workers, hub=Hub(phase=HubPhase.READY), heard=0.0, progress=None)
    made.see(*made.observed.workers, token_refused=("hub", "launcher"))
    first = made.plan()
    condition = first.status.condition(ConditionType.TOKEN_ACCEPTED)
    assert (condition.status, condition.reason, told(first)) == (False, "TokenRefused", ["TokenRefused"])
    begin = made.now
    while made.now < begin + DAY_S:
        made.now += 600
        assert told(made.plan()) == []
    status = made.job.status
    assert (status.attempt, status.failures, status.is_true(ConditionType.STALLED)) == (0, (), False)
    made.see(*made.observed.workers, token_refused=())
    assert made.plan().status.is_true(ConditionType.TOKEN_ACCEPTED)


def test_a_gang_that_is_said_to_stand_still_is_restarted_though_the_hub_refuses_our_token(
    running: Callable[..., Any],
) -> None:
    made = running(progress_deadline_s=20)
    made.now += 25
    made.see(*made.observed.workers, heard=made.now, token_refused=("hub",))
    assert made.plan().status.failures[-1].reason == "ProgressDeadlineExceeded"
    assert dataclasses.asdict(made.observed)["token_refused"] == ("hub",)
