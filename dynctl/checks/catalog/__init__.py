"""The checks, one file each: the module's name is the check's code with `_` for `-`."""
