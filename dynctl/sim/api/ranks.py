"""Which data-parallel rank a request is meant for, as vLLM 0.32 reads it. IO: none of its own."""

from collections.abc import Sequence

from dynctl.http1.server import Request
from dynctl.kv.ranks import RANK_HEADER
from dynctl.sim.api.requests import RefusedError
from dynctl.sim.engine import SimEngine


def rank_asked(request: Request, ranks: Sequence[SimEngine]) -> SimEngine | None:
    """Return the rank that is named; None: none is, or by no number.

    Raises:
        RefusedError: when there is no such rank.
    """
    text = request.header(RANK_HEADER)
    try:
        number = None if text is None else int(text)
    except ValueError:
        number = None
    if number is None:
        return None
    if not 0 <= number < len(ranks):
        raise RefusedError(f"data_parallel_rank {number} is out of range [0, {len(ranks)}).")
    return ranks[number]
