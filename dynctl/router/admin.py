"""What the admin socket answers beyond health and metrics: decisions, hits, findings, the policy. IO: none of its own."""

import re
import urllib.parse
from typing import TYPE_CHECKING

import msgspec

from dynctl.errors import DynctlError
from dynctl.router.api.answers import Failure

if TYPE_CHECKING:
    from dynctl.router.desk import Desk

_MAX_DECISIONS = 1000
_POLICY = re.compile(r"[a-z_]{1,40}")


def answer(desk: "Desk", method: str, path: str, query: bytes) -> tuple[int, bytes] | Failure:
    """Answer one request; a failure says why not."""
    args = urllib.parse.parse_qs(query.decode("ascii", "replace"))
    match (method, path):
        case ("GET", "/decisions"):
            return _decisions(desk, args)
        case ("GET", "/hits"):
            return 200, msgspec.json.encode(desk.hits.to_json())
        case ("GET", "/findings"):
            return 200, msgspec.json.encode(desk.probes.findings())
        case ("GET", "/policy"):
            return _policy(desk)
        case ("POST", "/policy"):
            return _set_policy(desk, args.get("name", [""])[0])
        case _:
            return Failure(404, f"no {path} here", "not_found")


def _decisions(desk: "Desk", args: dict[str, list[str]]) -> tuple[int, bytes] | Failure:
    limit = args.get("limit", ["100"])[0]
    if not limit.isdecimal() or not 0 < int(limit) <= _MAX_DECISIONS:
        text = f"limit is not between 1 and {_MAX_DECISIONS}"
        return Failure(400, text, "invalid_request", "limit")
    return 200, desk.ring.to_json(int(limit), args.get("request", [None])[0])


def _set_policy(desk: "Desk", name: str) -> tuple[int, bytes] | Failure:
    if not _POLICY.fullmatch(name):
        return Failure(400, "name is no policy's name", "invalid_request", "name")
    try:
        desk.set_policy(name)
    except DynctlError as error:
        return Failure(400, error.message, "invalid_request", "name")
    return _policy(desk)


def _policy(desk: "Desk") -> tuple[int, bytes]:
    return 200, msgspec.json.encode({"policy": desk.policy_name})
