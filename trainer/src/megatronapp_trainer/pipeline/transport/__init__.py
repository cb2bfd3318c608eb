"""Transfers of tensors between ranks by key, over the native transport."""
