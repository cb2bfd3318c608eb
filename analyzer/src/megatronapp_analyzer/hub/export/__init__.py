"""Traces of recorded steps for viewers: Chrome JSON and Perfetto's protobuf."""
