"""Traces without a running job: import of other tools' files, and the detector over recorded steps."""
