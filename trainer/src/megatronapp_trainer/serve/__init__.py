"""Serving of a trained model over HTTP, started with `python -m megatronapp_trainer.serve`.

All ranks generate together (`megatronapp_trainer.inference`). Rank 0 also answers HTTP in a separate thread; the two
threads meet at the `RequestBroker`.
"""
