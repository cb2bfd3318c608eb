"""Control of a running training by orders: pause, resume, step, stop. Imported only where it is turned on."""
