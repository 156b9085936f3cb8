"""What a block of an engine's KV stands for and how it is laid out, as a digest: engines with equal ones may hand blocks over.

Within one plan all engines of a deployment agree; while `up` replaces them, old and new ones may not, and KV of other
weights is no KV. Tensor-parallel sizes may differ, so they are no part of it.
Not here: who is paired (`router.paths`). Pure.
"""

import hashlib

import msgspec

from dynctl.agents.launch import Capabilities
from dynctl.agents.protocol import EngineWish

_RECIPE = "1"
"""Of what is below; digests of different recipes say nothing of each other."""

_HARMLESS_FLAGS = frozenset(
    {
        "chat-template",
        "enable-auto-tool-choice",
        "enable-log-requests",
        "generation-config",
        "gpu-memory-utilization",
        "max-log-len",
        "max-num-batched-tokens",
        "max-num-seqs",
        "num-gpu-blocks-override",
        "override-generation-config",
        "reasoning-parser",
        "scheduling-policy",
        "tool-call-parser",
        "uvicorn-log-level",
    }
)
"""They change no block. Any other flag may: a pair wrongly kept apart costs time, one wrongly made costs answers."""


def kv_identity(
    wish: EngineWish, can: Capabilities, version: str, block_size_tokens: int, home: str
) -> str:
    """Name what an engine's blocks are; empty where that is not known: adopted servers, engines that told nothing yet.

    Version and block size are as the engine told them. `home` is the host's home directory: models lie below it on hosts whose users differ.
    """
    if not (can.is_process and block_size_tokens) or (can.version_floor and not version):
        return ""
    flags = sorted((_plain(name), value) for name, value in wish.args)
    factors = (
        (wish.kind, version, _below(home, wish.python)),
        (_below(home, wish.model), wish.revision, wish.max_model_len_tokens),
        (block_size_tokens, wish.pp, wish.device),
        [flag for flag in flags if flag[0] not in _HARMLESS_FLAGS],
        sorted(wish.env),
    )
    return f"{_RECIPE}:{hashlib.sha256(msgspec.json.encode(factors)).hexdigest()[:16]}"


def _plain(flag: str) -> str:
    return flag.replace("_", "-").lower()


def _below(home: str, path: str | None) -> str | None:
    """A path as an inventory would have it."""
    home = home.rstrip("/")
    if path is None or not home or not path.startswith(f"{home}/"):
        return path
    return f"~{path[len(home) :]}"
