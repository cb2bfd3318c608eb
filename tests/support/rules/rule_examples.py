"""For every rule of a MegatronJob specs that it accepts and specs that it alone refuses: changes to one right manifest.

The same table is judged here and by a real API server.
"""

from rule_example import BASE, Changes, Example, changed, manifest, old_manifest
from rule_examples_admitted import ADMITTED_EXAMPLES
from rule_examples_cluster import CLUSTER_EXAMPLES
from rule_examples_disruption import DISRUPTION_EXAMPLES
from rule_examples_elastic import ELASTIC_EXAMPLES
from rule_examples_fields import FIELD_EXAMPLES
from rule_examples_messages import MESSAGE_EXAMPLES
from rule_examples_pods import POD_EXAMPLES
from rule_examples_runtimes import RUNTIME_EXAMPLES
from rule_examples_serve import SERVE_EXAMPLES
from rule_examples_world import WORLD_EXAMPLES

EXAMPLES: tuple[Example, ...] = (
    *FIELD_EXAMPLES,
    *WORLD_EXAMPLES,
    *RUNTIME_EXAMPLES,
    *MESSAGE_EXAMPLES,
    *CLUSTER_EXAMPLES,
    *DISRUPTION_EXAMPLES,
    *SERVE_EXAMPLES,
)
ADMISSION_EXAMPLES: tuple[Example, ...] = (*POD_EXAMPLES, *ELASTIC_EXAMPLES, *ADMITTED_EXAMPLES)
"""Examples of the rules that an admission policy judges on a cluster."""

__all__ = ["ADMISSION_EXAMPLES", "BASE", "EXAMPLES", "Changes", "Example", "changed", "manifest", "old_manifest"]
