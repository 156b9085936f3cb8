"""First inventories for `dynctl init`, one file each; the first comment line says what it is for. Not here: code."""
