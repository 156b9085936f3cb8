"""Running commands and moving files on hosts, over SSH or on this machine. Not here: what a command is for."""
