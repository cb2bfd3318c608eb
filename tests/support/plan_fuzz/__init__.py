"""Generated histories of the operator's plan in a small model of a cluster.

`history.play(seed)` draws a job, a cluster and what goes wrong in it, and plays them through. It raises `Broken` where
a promise of the plan does not hold: those of each look (`promises`), and that the job comes to its end or trains in
every world where it can (`liveness`).
"""
