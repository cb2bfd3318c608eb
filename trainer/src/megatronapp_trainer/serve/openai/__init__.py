"""Routes of OpenAI's clients."""
