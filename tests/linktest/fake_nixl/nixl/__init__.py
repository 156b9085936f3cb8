"""A stand-in for NIXL: its API without its library, so that both ends' conversation can be tested anywhere."""
