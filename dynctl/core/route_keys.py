"""What can name a request's line of business. Not here: which one does (`router.route_keys`). Pure."""

MAX_ROUTE_KEY_CHARS = 64


def is_route_key(name: str) -> bool:
    """Whether a name can be a route key: short, of one line, and something to see."""
    return 0 < len(name) <= MAX_ROUTE_KEY_CHARS and name.isprintable()


def is_body_field(path: str) -> bool:
    """Whether a path can lead to a field of a body: names joined by dots."""
    return all(path.split("."))
