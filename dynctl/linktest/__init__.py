"""Links between hosts, measured: who tests with whom when, small programs on both, verdicts."""
