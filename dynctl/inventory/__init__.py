"""Reading inventory.yaml: positions, checks, all problems at once. Not here: SSH, discovered facts."""
