"""MegaScope in the trainer: what of the model is looked at, reduced where it is. Imported only when on."""
