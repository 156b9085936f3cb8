"""The simulated engine that comes with dynctl: `python -m dynctl.sim` from the agent's own bundle.

Not here: the engine itself. Pure.
"""

from dynctl.agents.launch import (
    Capabilities,
    Launch,
    Places,
    extra_flags,
    flag_problems,
    gang_flags,
    gang_problems,
)
from dynctl.agents.protocol import EngineWish

_ROLES = {"prefill": "prefill", "decode": "decode", "aggregated": "both"}
_MANAGED = frozenset(
    {
        "uds",
        "listen",
        "model",
        "role",
        "kv-events",
        "kv-replay",
        "topic",
        "side-channel",
        "data-parallel-size",
        "control",
        "shutdown-timeout",
        "nnodes",
        "node-rank",
        "master-addr",
        "master-port",
        "headless",
        "max-model-len",
        "max-num-seqs",
        "block-size",
    }
)


class SimEngine:
    """Starts `dynctl.sim` on Unix sockets; GPUs named in the plan are only leased, never touched."""

    capabilities = Capabilities(start_deadline_s=30.0, stop_limit_s=10.0)

    def problems(self, wish: EngineWish) -> tuple[str, ...]:
        """Name what can never start."""
        found = list(flag_problems(wish.args, _MANAGED))
        if wish.role not in _ROLES:
            found.append(f"role {wish.role!r} is none of {', '.join(_ROLES)}")
        if wish.kv_transfer and wish.side_channel_port is None:
            found.append("it hands over KV blocks but the plan gives it no side channel port")
        found += gang_problems(wish)
        if wish.role in ("prefill", "decode") and not wish.kv_transfer:
            found.append(f"a {wish.role} engine must hand over KV blocks (kv_transfer)")
        return tuple(found)

    def launch(self, wish: EngineWish, places: Places) -> Launch:
        """Say how to start it."""
        at = places.endpoints(f"kv@{wish.id}", wish.dp)
        argv = [
            *(places.python, "-sP", "-m", "dynctl.sim", "--uds", at.socket),
            *("--model", wish.name, "--role", _ROLES[wish.role]),
        ]
        for flag, value in (
            ("--block-size", wish.block_size_tokens),
            ("--max-model-len", wish.max_model_len_tokens),
            ("--max-num-seqs", wish.max_num_seqs),
            ("--max-num-batched-tokens", wish.max_num_batched_tokens),
        ):
            if value is not None:
                argv += [flag, str(value)]
        argv += ["--kv-events", f"{at.kv_events}", "--kv-replay", f"{at.kv_replay}"]
        argv += ["--topic", at.topic]
        if wish.gang is not None:
            argv += gang_flags(wish.gang)
        if wish.dp > 1:
            argv += ["--data-parallel-size", str(wish.dp)]
        if wish.kv_transfer:
            argv += ["--side-channel", f"{wish.data_address}:{wish.side_channel_port}"]
        argv += ["--control", f"{places.directory}/control", "--shutdown-timeout", "5"]
        return Launch(
            argv=(*argv, *extra_flags(wish.args)),
            env=wish.env,
            has_bundle=True,
            at=at,
        )


ENGINE = SimEngine()
