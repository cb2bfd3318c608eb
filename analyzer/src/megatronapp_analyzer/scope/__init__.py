"""MegaScope in the hub: merges captures of all ranks and serves them to pages."""
