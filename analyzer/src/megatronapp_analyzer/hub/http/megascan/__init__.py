"""Answers about slow ranks: what-if slowdowns, the blame of a step, links, and the state of the tracer."""
