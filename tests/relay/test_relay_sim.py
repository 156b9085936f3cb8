"""The relay before a simulated engine in its own process: what a router sees of it."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from dynctl.kv.hashing import BlockHasher
from dynctl.kv.wire import Delta, FrameReader, Snapshot


async def start_sim(folder: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-sP", "-m", "dynctl.sim", "--uds", str(folder / "sim"), "--model", "m",
        "--block-size", "4", "--kv-events", f"ipc://{folder}/k.e", "--kv-replay", f"ipc://{folder}/k.r",
        "--topic", "kv", "--decode-ms", "1", "--seed", "7",
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip


def test_a_stream_and_its_blocks_come_through_whole(run, bench, entry_of):
    async def main():
        async with bench() as b:
            process = await start_sim(b.folder)
            try:
                await b.until_listening(b.folder / "sim")
                await b.settle(
                    entry_of(
                        "m-0",
                        "i1",
                        b.folder / "sim",
                        kv_events=f"ipc://{b.folder}/k.e",
                        kv_replay=f"ipc://{b.folder}/k.r",
                        topic="kv",
                        block_hash_seed="s",
                    )
                )
                body = {
                    "model": "m",
                    "prompt": "one two three four five six seven eight nine ten " * 4,
                    "max_tokens": 32,
                    "temperature": 0,
                    "return_token_ids": True,
                }
                path = "/v1/engine/m-0/v1/completions"
                fields = [(b"content-type", b"application/json")]
                whole = await b.pool.fetch("POST", path, fields, json.dumps(body).encode())
                assert whole.status == 200, whole.body
                choice = json.loads(whole.body)["choices"][0]
                stream = await b.pool.fetch(
                    "POST", path, fields, json.dumps({**body, "stream": True}).encode()
                )
                events = stream.body.split(b"\n\n")
                assert events[-2:] == [b"data: [DONE]", b""]
                pieces = [json.loads(event[6:])["choices"] for event in events[:-2]]
                text = "".join(choices[0]["text"] for choices in pieces if choices)
                assert text == choice["text"]

                ids = choice["prompt_token_ids"] + choice["token_ids"]
                # The engine computes no block for the token it gave last.
                wanted = set(BlockHasher(b"s", 4).prompt(ids[:-1]).hashes())
                sink, _ = b.open_stream("/v1/kv/m-0")
                reader, num_read, known = FrameReader(), 0, set()

                def knows_all() -> bool:
                    nonlocal num_read, known
                    data = bytes(sink.body[num_read:])
                    num_read += len(data)
                    for frame in reader.feed(data):
                        if isinstance(frame, Snapshot):
                            known = set(frame.hashes)
                        elif isinstance(frame, Delta):
                            known = (known - set(frame.removed)) | set(frame.stored)
                    return known == wanted

                await b.until(knows_all)
            finally:
                process.send_signal(signal.SIGTERM)
                assert await process.wait() == 0

    run(main)
