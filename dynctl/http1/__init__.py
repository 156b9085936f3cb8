"""HTTP/1.1 on raw asyncio protocols: framing guard, server, upstream pools, SSE borders."""
