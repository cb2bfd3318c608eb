"""Limits of probe texts. Manifests have them, too: here, `probe_texts` with its numpy is not imported for them."""

MAX_TEXTS = 8
MAX_TOKENS = 256
MAX_CHARACTERS = 2048
"""Longest text of a manifest."""
