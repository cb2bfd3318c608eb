"""Layout of ranks, process groups and agreement between ranks."""
