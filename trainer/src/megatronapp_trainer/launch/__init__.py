"""The launcher of a worker: gathers the gang, starts and supervises the ranks, tells how it ended. No torch here."""
