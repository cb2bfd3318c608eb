"""Control of a running training: orders, states, and the rules between them."""
