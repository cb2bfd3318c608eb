"""A TLS context for all HTTP clients of tests: httpx makes one for each client, even if it only speaks plain HTTP."""

import ssl

SHARED_TLS = ssl.create_default_context()
"""Reading the machine's authorities takes 20 ms of processor time."""
