"""Subcommands of `megatronapp` for jobs; the command itself lives in megatronapp_common."""

from megatronapp_operator.cli.commands import extend, register

__all__ = ["extend", "register"]
