"""The gateway: one entrance to the jobs that a user may see, which forwards requests and sockets to their hubs.

A hub runs in the namespace of its job, next to code that others wrote, so the gateway trusts none. It finds the hub's
address through the cluster, sends it a token of that job and nothing of the caller but, to controlling calls, the name,
and lets only JSON, numbers of MegaScope and binary frames through.
"""
