"""Generated histories of the operator's plan in a small model of a cluster.

`history.play(seed)` draws a job, a cluster and its faults, and plays them through. It raises `Broken` where
a promise of the plan does not hold: those of each look (`promises`), and that the job reaches its end or trains in
every world where it can (`liveness`).
"""
