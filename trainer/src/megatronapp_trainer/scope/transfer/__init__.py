"""Transfer of captures: copies from the device, quantisation and part frames."""
