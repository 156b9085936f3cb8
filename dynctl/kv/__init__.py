"""KV block hashing, engine event decoding, sequences and snapshots."""
