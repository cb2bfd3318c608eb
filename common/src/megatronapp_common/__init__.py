"""What the parts of MegatronApp agree on. Imports neither torch nor any other part."""

__version__ = "0.1.0"
