"""HTTP/1.1 on raw protocols: framing guard, server, upstream pools, event borders. Pure."""
