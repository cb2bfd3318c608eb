"""Delivery to pages: sockets, queues, recorded sessions and downloads."""
