"""Control of a running training over HTTP."""
