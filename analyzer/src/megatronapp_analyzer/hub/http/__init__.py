"""HTTP and WebSocket interface of the hub."""
