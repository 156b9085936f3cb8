"""Links between GPUs as they count for islands and groups. Pure."""

Square = tuple[tuple[str | None, ...], ...]


def as_nvlink(links: Square) -> Square:
    """AMD's XGMI joins GPUs the way NVLink does: for islands and groups it counts as one link."""
    return tuple(tuple("NV1" if cell == "XGMI" else cell for cell in row) for row in links)
