"""Reading inventory.yaml: positions, checks, all problems at once."""
