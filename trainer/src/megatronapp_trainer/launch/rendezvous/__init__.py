"""Rendezvous: launchers gather and receive the rank table."""
