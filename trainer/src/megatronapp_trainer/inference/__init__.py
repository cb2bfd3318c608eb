"""Generation with megatron-core's GPT model: a cache of keys and values, batches that requests join and leave.

Rank 0 holds the `Engine`; every other rank runs `WorkerGroup.follow`. A step of the engine is one `StepPlan`, which
contains all that the ranks need, so only rank 0 knows requests, and a follower knows nothing but its cache.
"""
