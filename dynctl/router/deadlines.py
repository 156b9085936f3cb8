"""How long a request may take where it is; past it an engine counts as hanging. IO: none of its own."""

from dynctl.router.config import Settings
from dynctl.router.handoff import Leg, Phase
from dynctl.router.ledger import Ledger


def overdue_leg(
    phase: Phase, ledger: Ledger, settings: Settings, now_s: float, *, is_stream: bool
) -> Leg | None:
    """The leg whose engine has had its time, or None."""
    if phase is Phase.PREFILLING:
        return Leg.PREFILL if _is_first_late(Leg.PREFILL, ledger, settings, now_s) else None
    if phase is Phase.MAIN:
        if not is_stream and now_s - ledger.sent_s <= settings.body_timeout_s:
            return None
        return Leg.MAIN if _is_first_late(Leg.MAIN, ledger, settings, now_s) else None
    if phase is Phase.STREAMING and _is_next_late(ledger, settings, now_s):
        return Leg.MAIN
    return None


def _is_first_late(leg: Leg, ledger: Ledger, settings: Settings, now_s: float) -> bool:
    booking = ledger.bookings[leg]
    predicted_s = booking.worker.prefill.at(booking.prefill_ahead_tokens) / 1e3
    return now_s - ledger.sent_s > max(settings.first_token_timeout_s, 4 * predicted_s)


def _is_next_late(ledger: Ledger, settings: Settings, now_s: float) -> bool:
    limit_s, gap_s = settings.gap_timeout_s, now_s - ledger.last_s
    if gap_s <= limit_s:
        return False
    # While the engine's other streams go on it is slow, not dead: wait three times as long.
    does_others = now_s - ledger.bookings[Leg.MAIN].worker.last_token_s <= limit_s
    return not does_others or gap_s > 3 * limit_s
