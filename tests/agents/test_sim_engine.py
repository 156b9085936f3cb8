"""The simulated engine under supervision, in every role."""

import asyncio
import json
import os
import re
import signal

import pytest

from dynctl.agents import ask
from dynctl.agents.protocol import EngineWish
from dynctl.agents.sampler import Sampler
from dynctl.core.deployment import EngineState as S

pytestmark = pytest.mark.usefixtures("no_process_left")


def sim(engine_id, role, **fields):
    return EngineWish(
        engine_id,
        "chat",
        role,
        "sim",
        "sim-8b",
        block_size_tokens=32,
        max_model_len_tokens=2048,
        **fields,
    )


@pytest.mark.parametrize("role", ["prefill", "decode", "aggregated"])
def test_sim_engine_becomes_ready_and_tells_its_cache(supervised, tools, role, free_ports):
    port = free_ports()

    async def body(supervisor):
        transfer = {} if role == "aggregated" else {"kv_transfer": True, "side_channel_port": port}
        await supervisor.apply(tools.host_slice(sim("s0", role, **transfer)))
        await tools.until(supervisor, lambda: tools.state(supervisor, "s0") is S.READY)

        info = supervisor.relay_table[0].info
        assert (info.block_size_tokens, info.max_model_len_tokens) == (32, 2048)
        assert info.kv_capacity_tokens > 0
        assert (info.kv_identity[:2], info.tp) == ("1:", 1)
        (sample,) = (await Sampler(supervisor).sample()).engines
        assert sample.generation_tokens_total == 1
        assert await supervisor.shutdown(now=False) == []

    supervised(body)


def test_an_engine_is_ready_once_each_of_its_ranks_has_given_a_token(supervised, tools, free_ports):
    port = free_ports(2)

    async def body(supervisor):
        transfer = {"kv_transfer": True, "side_channel_port": port}
        await supervisor.apply(tools.host_slice(sim("s0", "prefill", dp=2, **transfer)))
        await tools.until(supervisor, lambda: tools.state(supervisor, "s0") is S.READY)

        (entry,) = supervisor.relay_table
        assert (entry.info.ranks, entry.info.side_channel_port) == (2, port)
        unit = supervisor.units["s0"]
        assert unit.program.listens_on == (port, port + 1)
        text = await ask.metrics(entry_at := unit.run.at)
        tokens = re.findall(r'vllm:generation_tokens_total\{engine="(\d)".*\} (\S+)', text)
        assert tokens == [("0", "1.0"), ("1", "1.0")]
        sources = (await ask.ask(entry_at, "GET", "/kv_event_sources")).body
        told = {number: one["endpoint"] for number, one in json.loads(sources).items()}
        assert told == {"0": entry.kv_events, "1": f"{entry.kv_events}_dp1"}
        first, second = unit.program.ranks
        assert await second.says_token(unit.run, 30.0)
        of_rank = [
            (await rank.look(unit.run))[0].generation_tokens_total for rank in (first, second)
        ]
        assert of_rank == [1, 2]
        (sample,) = (await Sampler(supervisor).sample()).engines
        assert sample.generation_tokens_total == 3
        assert await supervisor.shutdown(now=False) == []

    supervised(body)


def test_figures_of_a_frozen_engine_grow_old_instead_of_vanishing(supervised, tools, monkeypatch):
    async def body(supervisor):
        await supervisor.apply(tools.host_slice(sim("s0", "aggregated")))
        await tools.until(supervisor, lambda: tools.state(supervisor, "s0") is S.READY)
        sampler = Sampler(supervisor)
        (fresh,) = (await sampler.sample()).engines
        pid = supervisor.units["s0"].run.identity.pid

        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(ask, "_METRICS_S", 0.3)
        await asyncio.sleep(0.5)
        (old,) = (await sampler.sample()).engines
        os.kill(pid, signal.SIGCONT)

        assert old.age_s >= fresh.age_s + 0.5
        assert old.generation_tokens_total == fresh.generation_tokens_total
        await supervisor.shutdown(now=True)

    supervised(body)
