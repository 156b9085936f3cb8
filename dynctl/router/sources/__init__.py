"""Where engines come from: relays' tables and KV deltas, or engines reached directly."""
