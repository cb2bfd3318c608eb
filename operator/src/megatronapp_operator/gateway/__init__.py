"""The gateway: one entrance for people. It lists the jobs that they may see and passes on what the jobs' hubs tell.

A hub runs in the namespace of its job, beside code that others wrote, so the gateway trusts none: it looks up by itself
where a job's hub is, gives it a token of that job and nothing of the caller but, to what controls, their name, and lets
through JSON, numbers of MegaScope and binary frames only.
"""
