"""`python -m megatronapp_trainer.serve`: a trained model behind an HTTP interface.

All ranks generate together (`megatronapp_trainer.inference`). Rank 0 also answers HTTP in a thread of its own; the two
threads meet at the `Desk`.
"""
