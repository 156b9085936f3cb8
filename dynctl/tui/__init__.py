"""Drawing snapshots. Polling, SSH and domain arithmetic live elsewhere."""
