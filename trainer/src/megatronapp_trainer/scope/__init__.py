"""MegaScope in the trainer: captures values of the model and reduces them on the device. Imported only when on."""
