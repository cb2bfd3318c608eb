"""The rules between the fields of a MegatronJob, each written once, in CEL.

The CRD carries them as `x-kubernetes-validations`, so that the API server judges them, and `judge` evaluates the same
texts locally. Problems are reported in the order of the rules.
"""

from megatronapp_common.job.rules.changes import CHANGE_RULES
from megatronapp_common.job.rules.cluster import CLUSTER_RULES
from megatronapp_common.job.rules.data import DATA_AT_ADMISSION, DATA_RULES
from megatronapp_common.job.rules.gang import GANG_AT_ADMISSION, GANG_RULES
from megatronapp_common.job.rules.messages import MESSAGE_RULES
from megatronapp_common.job.rules.model import MODEL_AT_ADMISSION, MODEL_RULES
from megatronapp_common.job.rules.name import NAME_RULES
from megatronapp_common.job.rules.network import NETWORK_RULES
from megatronapp_common.job.rules.policy import POLICY_RULES
from megatronapp_common.job.rules.rule import Rule, at_admission, where_given
from megatronapp_common.job.rules.run import RUN_RULES
from megatronapp_common.job.rules.runtimes import RUNTIME_RULES
from megatronapp_common.job.rules.serve import MODE_RULES, SERVE_RULES
from megatronapp_common.job.rules.training import TRAINING_AT_ADMISSION, TRAINING_RULES
from megatronapp_common.job.rules.world import WORLD_RULES

_OF_BOTH_MODES = (
    *MODEL_RULES,
    *TRAINING_RULES,
    *DATA_RULES,
    *RUN_RULES,
    *WORLD_RULES,
    *GANG_RULES,
    *RUNTIME_RULES,
    *MESSAGE_RULES,
    *CLUSTER_RULES,
    *NETWORK_RULES,
    *POLICY_RULES,
)
SPEC_RULES = (*MODE_RULES, *map(where_given, _OF_BOTH_MODES), *SERVE_RULES)
"""Rules over `self`, the spec with its defaults."""

ADMITTED_RULES = tuple(
    at_admission(where_given(rule))
    for rule in (*MODEL_AT_ADMISSION, *TRAINING_AT_ADMISSION, *DATA_AT_ADMISSION, *GANG_AT_ADMISSION)
)
"""Rules over `object` about what the trainer refuses, which an admission policy carries."""

__all__ = ["ADMITTED_RULES", "CHANGE_RULES", "NAME_RULES", "SPEC_RULES", "Rule"]
