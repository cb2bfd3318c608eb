"""Contracts of MegaScope: vector filters, pixels, how shards merge, and the codes of numbers in frames.

Pure Python and numpy. The implementation for devices is `megatronapp_trainer.scope`.
"""
