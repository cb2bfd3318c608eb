"""A plugin of MegaScope: two places to look at that it does not have by itself.

megatronapp run examples/scope-plugin-serve.yaml serves the model of examples/scope-tiny.yaml with it.
"""

from typing import Any

import torch

from megatronapp_trainer.hooks.sites import register_site


def gate(inputs: tuple[Any, ...], _output: Any) -> torch.Tensor:  # noqa: ANN401 - of megatron-core
    """Return the input of the second linear layer of the MLP: the activations, [tokens, width of this rank's share]."""
    hidden: torch.Tensor = inputs[0]
    return hidden.squeeze(1)


register_site("input_norm", "input_layernorm", reducers=("data.square().mean(dim=-1).sqrt()",), pixels=1)
register_site("activations", "mlp.linear_fc2", take=gate, reducers=("absmax",), pixels=8)
