"""One file per engine kind, each with an object `ENGINE`; they do not know each other. Pure."""
