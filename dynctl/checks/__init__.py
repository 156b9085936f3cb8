"""Named checks of a cluster: evidence in, findings out, each with its fix and a command that proves it."""
