"""vLLM with NIXL: `vllm serve` from the engine's own environment, on Unix sockets, every port set by us.

Not here: knowledge of our code in that environment (it must not see the bundle's packages).
Source: `vllm serve --help=all` and runs of vLLM 0.32.0 with NIXL 1.5.1, November 2026.
Pure.
"""

import json
from collections.abc import Sequence

from dynctl.agents.launch import (
    Capabilities,
    Endpoints,
    Launch,
    Places,
    extra_flags,
    flag_problems,
    gang_flags,
    gang_problems,
)
from dynctl.agents.protocol import EngineWish

_STOP_LIMIT_S = 30.0
# vLLM ends requests still running after this long; less than the stop limit, so that it can end by itself.
_SHUTDOWN_TIMEOUT_S = 20

UCX_TCP_PORTS = "30000-32699"
"""Where NIXL's TCP transport listens on the data interface when there is no RDMA: one range a firewall can name.

Below the kernel's range for outgoing connections; UCX takes a free one at random. Source: `UCX_TCP_PORT_RANGE`
of the UCX in nixl 1.5.1; its listeners were seen there.
"""

_MANAGED = frozenset(
    {
        "host",
        "port",
        "uds",
        "root-path",
        "grpc-port",
        "model",
        "model-tag",
        "config",
        "served-model-name",
        "tokenizer",
        "revision",
        "device-ids",
        "tensor-parallel-size",
        "tp",
        "pipeline-parallel-size",
        "pp",
        "distributed-executor-backend",
        "nnodes",
        "node-rank",
        "master-addr",
        "master-port",
        "headless",
        "data-parallel-size",
        "data-parallel-rank",
        "data-parallel-start-rank",
        "data-parallel-size-local",
        "data-parallel-address",
        "data-parallel-rpc-port",
        "data-parallel-backend",
        "data-parallel-external-lb",
        "data-parallel-hybrid-lb",
        "data-parallel-multi-port-external-lb",
        "data-parallel-supervisor-port",
        "api-server-count",
        "kv-events-config",
        "kv-transfer-config",
        "shutdown-timeout",
        "enable-prompt-tokens-details",
        "no-enable-prompt-tokens-details",
        "no-enable-prefix-caching",
        "disable-log-stats",
        "disable-access-log-for-endpoints",
    }
)


class VllmEngine:
    """Starts one `vllm serve` on the GPUs of the plan, or on the CPU."""

    capabilities = Capabilities(
        needs_gpus=True,
        version_floor=(0, 33, 0),
        start_deadline_s=1800.0,
        stop_limit_s=_STOP_LIMIT_S,
    )

    def problems(self, wish: EngineWish) -> tuple[str, ...]:
        """Name what can never start."""
        found = list(flag_problems(wish.args, _MANAGED))
        if not wish.python:
            found.append("engine.python must name the interpreter of the environment with vllm")
        if wish.device not in ("gpu", "cpu"):
            found.append(f"device {wish.device!r} is neither gpu nor cpu")
        found += gang_problems(wish)
        nodes = wish.gang.nodes if wish.gang else 1
        num_gpus = wish.tp * wish.pp * wish.dp // nodes
        if wish.device == "gpu" and len(wish.gpus) != num_gpus:
            sizes = f"TP {wish.tp} × PP {wish.pp}" + (f" × DP {wish.dp}" if wish.dp > 1 else "")
            where = f" on each of {nodes} hosts" if nodes > 1 else ""
            found.append(f"{sizes} takes {num_gpus} GPUs{where}, not {len(wish.gpus)}")
        if wish.ep not in (1, wish.tp * wish.dp):
            found.append(
                f"EP {wish.ep}: vLLM spreads experts over all {wish.tp * wish.dp} ranks of TP × DP, or none"
            )
        if wish.kv_transfer and wish.side_channel_port is None:
            found.append("it hands over KV blocks but the plan gives it no side channel port")
        return tuple(found)

    def launch(self, wish: EngineWish, places: Places) -> Launch:
        """Say how to start it."""
        at = places.endpoints(f"kv@{wish.id}", wish.dp)
        return Launch(
            argv=(*_argv(wish, places, at), *extra_flags(wish.args)),
            env=_merged(_env(wish, places), wish.env),
            at=at,
        )


def _argv(wish: EngineWish, places: Places, at: Endpoints) -> list[str]:
    assert wish.python is not None
    # The module rather than the `vllm` script: a copied environment's scripts name another interpreter.
    argv = [wish.python, "-m", "vllm.entrypoints.cli.main", "serve", wish.model]
    argv += ["--served-model-name", wish.name, "--uds", at.socket]
    for flag, value in (
        ("--tokenizer", wish.tokenizer),
        ("--revision", wish.revision),
        ("--max-model-len", wish.max_model_len_tokens),
        ("--max-num-seqs", wish.max_num_seqs),
        ("--max-num-batched-tokens", wish.max_num_batched_tokens),
        ("--block-size", wish.block_size_tokens),
        (
            "--gpu-memory-utilization",
            wish.gpu_memory_utilization if wish.device == "gpu" else None,
        ),
    ):
        if value is not None:
            argv += [flag, str(value)]
    argv += ["--tensor-parallel-size", str(wish.tp), "--pipeline-parallel-size", str(wish.pp)]
    if wish.tp * wish.pp > 1:
        argv += ["--distributed-executor-backend", "mp"]
    if wish.dp > 1:
        argv += ["--data-parallel-size", str(wish.dp)]
    if wish.ep > 1:
        argv += ["--enable-expert-parallel"]
    if wish.gang is not None:
        argv += gang_flags(wish.gang)
    else:
        argv += ["--master-port", str(places.internal_port)]
    argv += ["--kv-events-config", _json(_kv_events(at))]
    if wish.kv_transfer:
        argv += ["--kv-transfer-config", _json(_kv_transfer(wish, places))]
    argv += ["--enable-prompt-tokens-details", "--shutdown-timeout", str(_SHUTDOWN_TIMEOUT_S)]
    argv += ["--disable-access-log-for-endpoints", "/health,/metrics"]
    return argv


def _kv_events(at: Endpoints) -> dict[str, object]:
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": at.kv_events,
        "replay_endpoint": at.kv_replay,
        "topic": at.topic,
    }


def _kv_transfer(wish: EngineWish, places: Places) -> dict[str, object]:
    config: dict[str, object] = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        # The router, not the engine, decides what happens after a failed transfer.
        "kv_load_failure_policy": "fail",
        # Shows in kv_transfer_params as remote_engine_id, so that the router can tell incarnations apart.
        "engine_id": f"{wish.id}.{places.incarnation}",
    }
    if wish.device == "cpu":
        config["kv_buffer_device"] = "cpu"
    return config


def _env(wish: EngineWish, places: Places) -> dict[str, str]:
    env = {
        # The model lies on the host: nothing is fetched, nothing is told to anyone.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # Everything it opens by itself: loopback, our ports, our directory.
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOOPBACK_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "VLLM_PORT": str(places.internal_port + 1),
        "VLLM_DP_MASTER_PORT": str(places.internal_port + 12),
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(places.internal_port + 13),
        "VLLM_P2P_SIDE_CHANNEL_PORT": str(places.internal_port + 14),
        "VLLM_EC_SIDE_CHANNEL_PORT": str(places.internal_port + 15),
        "VLLM_RPC_BASE_PATH": places.directory,
        "VLLM_CACHE_ROOT": f"{places.root}/cache/vllm",
        "TORCHINDUCTOR_CACHE_DIR": f"{places.root}/cache/torchinductor",
        "TRITON_CACHE_DIR": f"{places.root}/cache/triton",
        "VLLM_LOGGING_COLOR": "0",
    }
    if wish.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
        # Its own binding would pin every engine of the machine to the same cores.
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        env["OMP_NUM_THREADS"] = "1"
        env["VLLM_CPU_KVCACHE_SPACE"] = "1"
    else:
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in wish.gpus)
    if wish.gang is not None:
        # What its members open to each other: on the data interface alone, but for the port where they meet.
        env["VLLM_HOST_IP"] = wish.data_address
        env["GLOO_SOCKET_IFNAME"] = places.interface
        env["NCCL_SOCKET_IFNAME"] = f"={places.interface}"
    if wish.kv_transfer:
        env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = wish.data_address
        env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(wish.side_channel_port)
        env["UCX_TCP_PORT_RANGE"] = UCX_TCP_PORTS
        if wish.nics:
            env["UCX_NET_DEVICES"] = net_devices(wish.nics)
    return env


def net_devices(nics: Sequence[str]) -> str:
    """RDMA devices as UCX names them: with their port."""
    return ",".join(name if ":" in name else f"{name}:1" for name in nics)


def _merged(env: dict[str, str], extra: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Put the user's variables over ours, in a stable order."""
    return tuple(sorted((env | dict(extra)).items()))


def _json(value: dict[str, object]) -> str:
    return json.dumps(value, separators=(",", ":"))


ENGINE = VllmEngine()
