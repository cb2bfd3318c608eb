"""Forwarding of requests and sockets to hubs: where a hub is, what passes in each direction, and the limits."""
