"""Routes for clients of OpenAI's interface."""
