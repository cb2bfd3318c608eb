"""MegaScope, what its parts agree on: vector filters, pixels, how shards merge, and the codes of numbers in frames.

Pure Python and numpy. The side that runs on the device is `megatronapp_trainer.scope`.
"""
