"""Agents that pretend to transfer. FAKE_NIXL chooses what goes wrong: start, transfer, metadata."""

import os

FAULT = os.environ.get("FAKE_NIXL", "")
LOG = """\
[1.0] [h:1:0]     ucp_context.c:2753 UCX  INFO  Version 9.8.7 (loaded from /x)
[1.0] [h:1:0]   | init inter-node cfg#1                                            |
[1.0] [h:1:0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1.0] [h:1:0]   | 0..inf | zero-copy | rc_mlx5/mlx5_3:1 |
"""


class nixlBackendError(Exception):  # noqa: N801 - its name in NIXL
    pass


class nixl_agent_config:  # noqa: N801 - its name in NIXL
    def __init__(self, backends):
        self.backends = backends


class nixl_agent:  # noqa: N801 - its name in NIXL
    def __init__(self, name, config):
        if FAULT == "start":
            raise nixlBackendError("NIXL_ERR_BACKEND")
        self.name = name
        # As C code does: past Python's sys.stdout.
        os.write(1, LOG.encode())

    def get_plugin_list(self):
        return ["POSIX"] if FAULT == "plugin" else ["POSIX", "UCX"]

    def register_memory(self, regions, mem_type, backends):
        assert [len(region) for region in regions] == [4]
        assert (mem_type, backends) == ("DRAM", ["UCX"])
        return object()

    def deregister_memory(self, registered):
        pass

    def get_agent_metadata(self):
        return f"metadata of {self.name}".encode()

    def add_remote_agent(self, metadata):
        assert metadata.startswith(b"metadata of ")
        if FAULT == "metadata":
            raise nixlBackendError("NIXL_ERR_MISMATCH")
        return metadata.removeprefix(b"metadata of ")

    def remove_remote_agent(self, name):
        assert isinstance(name, str)

    def get_xfer_descs(self, pieces, mem_type):
        assert [len(piece) for piece in pieces] == [3]
        return pieces

    def initialize_xfer(self, operation, mine, theirs, peer, backends):
        assert operation == "READ"
        assert [p[1] for p in mine] == [p[1] for p in theirs]
        return {"left": 0}

    def transfer(self, handle):
        handle["left"] = 3
        return "PROC"

    def check_xfer_state(self, handle):
        handle["left"] -= 1
        if FAULT == "transfer":
            return "ERR"
        return "DONE" if handle["left"] <= 0 else "PROC"

    def release_xfer_handle(self, handle):
        pass
