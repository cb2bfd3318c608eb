"""The spec of a layer's mixture of experts."""

from typing import Any

from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.spec_utils import ModuleSpec

from megatronapp_trainer.models.experts import uneven_collectives
from megatronapp_trainer.models.experts.grouped import Experts
from megatronapp_trainer.models.experts.router import CountingRouter


def experts_spec(*, grouped: bool) -> Any:  # noqa: ANN401 - ModuleSpec
    """Return megatron-core's MoELayer with our experts, and a router that counts. `grouped` as in `Experts`."""
    uneven_collectives.install()
    spec = get_moe_module_spec(use_te=False, num_experts=1, moe_grouped_gemm=False)
    spec.submodules.experts = ModuleSpec(module=Experts, params={"grouped": grouped})
    spec.submodules.router = CountingRouter
    return spec
