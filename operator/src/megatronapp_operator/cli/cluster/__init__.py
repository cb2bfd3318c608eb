"""The subcommands for jobs of a cluster: the same arguments, requests to an API server."""

import argparse
import os

CONTEXT_VARIABLE = "MEGATRONAPP_CONTEXT"
"""Environment variable with a context of the kubeconfig, which makes every subcommand use that cluster."""


def meant(arguments: argparse.Namespace) -> bool:
    """Return True if the command line selects a cluster, and False for this machine."""
    return given(arguments) or bool(os.environ.get(CONTEXT_VARIABLE))


def given(arguments: argparse.Namespace) -> bool:
    """Return True if an option of the command line selects a cluster."""
    return any(getattr(arguments, name, None) for name in ("context", "namespace", "kubeconfig", "cluster"))
