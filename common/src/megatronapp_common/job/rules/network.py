"""Rules about the network of a cluster."""

from megatronapp_common.job.rules.rule import Rule, cel_message, no_item

_MODE, _RDMA = "self.network.mode", "self.network.rdma"
_NCCL = "self.network.nccl"

NETWORK_RULES = (
    Rule(
        id="rdma-needs-a-resource",
        field=".network.rdma.resourceName",
        rule=f"!{_RDMA}.enabled || {_RDMA}.devices == 'HostPath' || has({_RDMA}.resourceName)",
        message="is missing; write the resource of the cluster's device plugin, such as rdma/hca_shared_devices_a, "
        "or network.mode: HostNetwork with network.rdma.devices: HostPath (a privileged container)",
    ),
    Rule(
        id="host-path-devices-need-host-network",
        field=".network.rdma.devices",
        rule=f"{_RDMA}.devices != 'HostPath' || ({_RDMA}.enabled && {_MODE} == 'HostNetwork')",
        message="HostPath needs network.rdma.enabled: true and network.mode: HostNetwork; for other modes write the "
        "resource of the device plugin (resourceName)",
    ),
    Rule(
        id="devices-from-one-place",
        field=".network.rdma.resourceName",
        rule=f"{_RDMA}.devices != 'HostPath' || !has({_RDMA}.resourceName)",
        message="has no effect with network.rdma.devices: HostPath; leave one of them out",
    ),
    Rule(
        id="host-path-devices-need-root",
        field=".network.rdma.ipcLock",
        rule=f"{_RDMA}.devices != 'HostPath' || {_RDMA}.ipcLock",
        message="must be true for network.rdma.devices: HostPath, whose container is root and privileged",
    ),
    Rule(
        id="shared-device-needs-rdma",
        field=".network.rdma.enabled",
        rule=f"{_MODE} != 'SharedDevice' || {_RDMA}.enabled",
        message="must be true for network.mode SharedDevice, which has no other purpose",
    ),
    Rule(
        id="mode-needs-attachments",
        field=".network.attachments",
        rule=f"!({_MODE} in ['Sriov', 'Macvlan']) || self.network.attachments.size() > 0",
        message="is missing; network.mode Sriov and Macvlan need a network of Multus, "
        "as in attachments: [NAMESPACE/NAME]",
        message_expression=cel_message(
            f"is missing; network.mode {{{_MODE}}} needs a network of Multus: attachments: [NAMESPACE/NAME]"
        ),
    ),
    Rule(
        id="host-network-has-no-attachments",
        field=".network.attachments",
        rule=f"{_MODE} != 'HostNetwork' || self.network.attachments.size() == 0",
        message="have no effect on pods in the node's own network; leave them out, or change network.mode",
    ),
    Rule(
        id="host-network-has-no-policy",
        field=".network.policy",
        rule=f"{_MODE} != 'HostNetwork' || self.network.policy == 'None'",
        message="must be None for network.mode HostNetwork: a NetworkPolicy does not apply to pods in the node's own "
        "network, so JobOnly would have no effect",
    ),
    Rule(
        id="topology-order-needs-a-key",
        field=".network.topologyKey",
        rule="self.network.rankOrder != 'Topology' || has(self.network.topologyKey)",
        message="is missing; rankOrder Topology needs the label of nodes to sort by, "
        "such as topology.kubernetes.io/zone",
    ),
    Rule(
        id="nccl-variables",
        field=".network.nccl",
        rule=no_item(_NCCL, "key", "!(key.startsWith('NCCL_') || key.startsWith('UCX_'))"),
        message="holds a variable that does not begin with NCCL_ or UCX_; write it under spec.env",
    ),
    Rule(
        id="nccl-variables-once",
        field=".network.nccl",
        rule=no_item("self.env", "variable", f"variable.name in {_NCCL}"),
        message="holds a variable that env holds too; leave one of them out",
    ),
)
