"""Transfer parameters of a prefill engine: believed only if they fit the engine that was chosen, used once.

Whoever controls these parameters can make a decode engine read any peer's memory, so every field is checked and an
unknown one refuses the whole. Names and types: answers of vLLM 0.32.0 (NixlConnector). Not here: retries. Pure.
"""

from typing import Any

from dynctl.router.workers import Worker

_INTEGERS = {
    "tp_size": (1, 64),
    "dcp_size": (1, 64),
    "pp_size": (1, 64),
    "remote_num_tokens": (0, 2**31),
    "remote_prefill_cached_tokens": (0, 2**31),
}
_TEXTS = {"remote_engine_id": 200, "remote_request_id": 400, "transfer_mode": 32}
_KNOWN = {
    *_INTEGERS,
    *_TEXTS,
    "do_remote_prefill",
    "do_remote_decode",
    "remote_block_ids",
    "remote_host",
    "remote_port",
    "remote_blocks_expiry_time",
}


def transfer_fault(params: Any, worker: Worker, prompt_tokens: int | None) -> str:  # noqa: ANN401 - an engine's JSON
    """Say why parameters do not fit the prefill engine `worker`; empty: they do, and its identity is noted.

    `prompt_tokens` bounds the number of blocks; None where the prompt's length is not known.
    """
    if not isinstance(params, dict):
        return "no transfer parameters"
    unknown = sorted(set(params) - _KNOWN)
    if unknown:
        return f"unknown field {unknown[0][:40]!r}"
    if params.get("do_remote_prefill") is not True or params.get("do_remote_decode") is not False:
        return "not marked as a remote prefill"
    fault = _plain_fault(params) or _address_fault(params, worker)
    fault = fault or _blocks_fault(params.get("remote_block_ids"), worker, prompt_tokens)
    if fault:
        return fault
    identity = params["remote_engine_id"]
    if worker.transfer_identity and worker.transfer_identity != identity:
        return "another engine's identity"
    worker.transfer_identity = identity
    return ""


def _plain_fault(params: dict[str, Any]) -> str:
    for name, (low, high) in _INTEGERS.items():
        value = params.get(name, low)
        if type(value) is not int or not low <= value <= high:
            return f"{name} out of range"
    for name, max_chars in _TEXTS.items():
        value = params.get(name, "")
        if not isinstance(value, str) or len(value) > max_chars:
            return f"{name} is no short text"
    expiry = params.get("remote_blocks_expiry_time")
    if expiry is not None and type(expiry) not in {int, float}:
        return "remote_blocks_expiry_time is no time"
    if not params.get("remote_engine_id") or not params.get("remote_request_id"):
        return "no engine or request named"
    return ""


def _address_fault(params: dict[str, Any], worker: Worker) -> str:
    host, port = params.get("remote_host"), params.get("remote_port")
    if not isinstance(host, str) or not host or type(port) is not int or not 0 < port < 65536:
        return "no address"
    info = worker.info
    if info.side_channel_host and host != info.side_channel_host:
        return "another host than the engine's side channel"
    if info.side_channel_port and port != info.side_channel_port:
        return "another port than the engine's side channel"
    return ""


def _blocks_fault(groups: object, worker: Worker, prompt_tokens: int | None) -> str:
    if not isinstance(groups, list | tuple) or not all(isinstance(g, list) for g in groups):
        return "remote_block_ids is no list of lists"
    if any(type(block) is not int or block < 0 for group in groups for block in group):
        return "a block id that is no number"
    if prompt_tokens is not None and worker.block_size:
        most = -(-prompt_tokens // worker.block_size) + 1
        if any(len(group) > most for group in groups):
            return "more blocks than the prompt has"
    return ""
