"""Words and cards of RDMA: what the tools' states mean, and what each card can do.

Not here: reading any tool's output, merging what several tell (`nics`).
Pure.
"""

import re

GBIT = 10**9
CARD_RATES_BITS_S = {
    "MT4115": 100 * GBIT,  # ConnectX-4
    "MT4119": 100 * GBIT,  # ConnectX-5
    "MT4121": 100 * GBIT,  # ConnectX-5 Ex
    "MT4123": 200 * GBIT,  # ConnectX-6
    "MT4129": 400 * GBIT,  # ConnectX-7
    "MT4131": 800 * GBIT,  # ConnectX-8
    "MT41692": 400 * GBIT,  # BlueField-3
}
"""Highest rate of one port by HCA type. Boards may be sold for less (a ConnectX-7 of 200), so that a lower rate is a
question, not a fault. Virtual functions (MT4124, MT4126) and the many ConnectX-6 Dx boards (MT4125) tell nothing.
Source: PCI device ids in the mlx5 driver, product briefs."""

CARD_NAMES = {
    "MT4115": "ConnectX-4",
    "MT4119": "ConnectX-5",
    "MT4121": "ConnectX-5 Ex",
    "MT4123": "ConnectX-6",
    "MT4125": "ConnectX-6 Dx",
    "MT4129": "ConnectX-7",
    "MT4131": "ConnectX-8",
    "MT41692": "BlueField-3",
}

LANES = re.compile(r"\(\s*([0-9]{1,2})X\b", re.IGNORECASE)
RATE = re.compile(r"\s*([0-9]{1,5}(?:\.[0-9]{1,3})?)\s*(?:Gb/sec)?")


def port_state(word: str) -> str:
    """`4: ACTIVE`, `PORT_ACTIVE (4)`, `Active` and `Initializing` as one lower-case word."""
    text = re.sub(r"^\s*[0-9]+\s*:\s*|\(.*$", "", word).strip().lower()
    text = text.removeprefix("port_")
    return {"initializing": "init", "": "unknown"}.get(text, text)[:32]


def physical_state(word: str | None) -> str | None:
    """`5: LinkUp` and `LINK_UP` as `linkup`; None where the tool does not tell."""
    if word is None:
        return None
    text = re.sub(r"^\s*[0-9]+\s*:\s*|\(.*$", "", word).strip().lower()
    return text.replace("_", "")[:32] or "unknown"


def rate_bits_s(text: str) -> int | None:
    """`400`, `400 Gb/sec (4X NDR)`; None when it is no rate."""
    match = RATE.match(text)
    return int(float(match[1]) * 1e9) if match else None


def num_lanes(text: str) -> int | None:
    """The width in `200 Gb/sec (2X NDR)`."""
    match = LANES.search(text)
    return int(match[1]) if match else None


def same_guid(text: str) -> str:
    """`0xf8c967cfe74e66e1` and `f8c9:67cf:e74e:66e1` alike."""
    return re.sub(r"[^0-9a-f]", "", text.lower().removeprefix("0x"))[:16]
