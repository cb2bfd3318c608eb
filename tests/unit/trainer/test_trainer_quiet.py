"""Filter that drops only needless messages of megatron-core."""

import logging
from typing import Any
from unittest import mock

import pytest

from megatronapp_trainer.utils.silence_megatron import silence_megatron_imports, silence_saving


def warnings_of_difference(here: dict[str, Any], caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the message of rank 1 when rank 0 has another state, without a process group."""
    with silence_megatron_imports():
        import torch.distributed as dist
        from megatron.core.dist_checkpointing import validation
        from megatron.core.dist_checkpointing.mapping import ShardedObject
        from megatron.core.dist_checkpointing.utils import extract_sharded_base
    gathered = {0: {"exp_avg": ShardedObject("exp_avg", 1.0, (1,), (0,))}}
    rank_zero = {"optimizer": {"param_state": gathered, "step": 3}}
    common = [extract_sharded_base(state)[1] for state in (rank_zero, here)]

    def broadcast(box: list[Any], src: int) -> None:
        box[src] = common[0]

    with (
        mock.patch.object(dist, "is_initialized", lambda: True),
        mock.patch.object(dist, "get_rank", lambda: 1),
        mock.patch.object(dist, "broadcast_object_list", broadcast),
        caplog.at_level(logging.WARNING),
        silence_saving(),
    ):
        validation._validate_common_state_dict(common[1])
    return [record.getMessage() for record in caplog.records]


def test_optimizer_state_of_the_first_replica_gives_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of_difference({"optimizer": {"param_state": None, "step": 3}}, caplog) == []


@pytest.mark.parametrize(
    "here",
    [
        {"optimizer": {"param_state": None, "step": 4}},
        {"optimizer": {"param_state": None, "step": 3}, "iteration": 7},
    ],
)
def test_any_other_difference_gives_a_warning(here: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    (message,) = warnings_of_difference(here, caplog)
    assert "differs from rank 0" in message


def test_without_the_filter_megatron_speaks(caplog: pytest.LogCaptureFixture) -> None:
    """Check that the filter is still needed."""
    with mock.patch("megatronapp_trainer.utils.silence_megatron._is_relevant", lambda _record: True):
        assert len(warnings_of_difference({"optimizer": {"param_state": None, "step": 3}}, caplog)) == 1
