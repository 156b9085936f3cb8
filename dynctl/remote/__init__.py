"""Running commands and moving files on hosts, over SSH or on this machine."""
