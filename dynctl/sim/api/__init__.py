"""The simulated engine's HTTP surface: vLLM's routes, bodies and errors."""
