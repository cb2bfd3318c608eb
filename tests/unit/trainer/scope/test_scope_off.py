"""Absence of a capture: nothing of MegaScope is imported, and no module has a hook. Nor does this file import it."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from generating_ranks import VARIANTS, config_of, drain, groups_of, model_of, open_engine, prompts

from megatronapp_trainer.inference.request import GenerationRequest

pytestmark = pytest.mark.torch


def generate(variant: str) -> tuple[list[str], int]:
    """Modules of MegaScope that were imported, and hooks on the model, after some tokens."""
    import megatronapp_trainer.serve.rank_main  # noqa: F401 - what serves must not bring it along

    with groups_of("") as (layout, device):
        config = config_of(variant)
        gang, engine = open_engine(model_of(config, layout, device), config, layout, device)
        assert engine is not None
        engine.submit(GenerationRequest(id="a", prompt=prompts((5,))[0], max_new_tokens=3))
        drain(engine)
        engine.close()
        hooks = sum(
            len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
            for module in gang.runner.model.modules()
        )
    return [name for name in sys.modules if name.startswith("megatronapp_trainer.scope")], hooks


def test_nothing_is_imported_and_nothing_installed(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(1, generate, VARIANTS["rotary-grouped"]) == [([], 0)]
