"""The simulated engine: an OpenAI server with a real prefix cache and no model."""
