"""What a user must be told about a host, one file per part of it, each exporting RULES."""
