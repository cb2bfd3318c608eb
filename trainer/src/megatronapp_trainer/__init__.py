"""The trainer of MegatronApp: launcher, training, serving, tracing and conversion."""
