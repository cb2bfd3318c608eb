"""The door: one entrance for people. It lists the jobs that they may see and passes on what the jobs' hubs tell.

A hub runs in the namespace of its job, beside code that others wrote, so the door trusts none: it looks up by itself
where a job's hub is, gives it the viewer's token of that job and nothing of the caller, and lets through JSON and
binary frames only.
"""
