"""Parts of the timeline of one step, whose size depends on what a picture shows and not on the size of the job."""
