"""The host's relay: engine HTTP, KV deltas and the engine table over one mutual-TLS port. Pure."""
