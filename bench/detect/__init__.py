"""A benchmark for detectors of slow ranks: simulated jobs, a grammar of faults, baselines, and a scorer.

The simulation has nothing in common with the analyzer but the record format (`megatronapp_common.trace`); only
`current` imports the analyzer, to run its detector among others. docs/detector-benchmark.md describes the whole.
"""
