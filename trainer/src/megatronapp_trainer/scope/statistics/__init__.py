"""Statistics of layers in captured steps of a training. Imported only where captures are turned on."""
