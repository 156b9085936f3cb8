"""One OpenAI-style entrance, KV-aware."""
