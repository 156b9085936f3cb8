"""What is known at one place of a recording. Pure."""

from dataclasses import dataclass

from dynctl.telemetry.figures import Overview
from dynctl.telemetry.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Look:
    """Figures there, and what was remembered on the way."""

    overview: Overview
    ledger: Ledger
