"""Contracts between the parts of MegatronApp. Imports neither torch nor any other part."""

__version__ = "0.1.0"
