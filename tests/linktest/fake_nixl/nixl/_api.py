"""Agents that pretend to transfer. FAKE_NIXL chooses what goes wrong: start, transfer, metadata.

Signatures are those of nixl 1.5.1. Memory that is registered is read and compared, so it has to be there.
"""

import ctypes
import os

FAULT = os.environ.get("FAKE_NIXL", "")
LOG = """\
[1.0] [h:1:0]     ucp_context.c:2753 UCX  INFO  Version 9.8.7 (loaded from /x)
[1.0] [h:1:0]   | init inter-node cfg#1                                            |
[1.0] [h:1:0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1.0] [h:1:0]   | 0..inf | zero-copy | rc_mlx5/mlx5_3:1 |
[1.0] [h:1:0]   | init inter-node cfg#1 | remote memory read by ucp_get*(multi) into cuda/GPU0 from host |
[1.0] [h:1:0]   | 0..inf | zero-copy | rc_mlx5/mlx5_0:1 |
[1.0] [h:1:0]   | init inter-node cfg#1 | remote memory read by ucp_get*(multi) into cuda/GPU0 from cuda/dev[0] |
[1.0] [h:1:0]   | 0..inf | zero-copy | rc_mlx5/mlx5_0:1 |
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

    def register_memory(self, reg_list, mem_type=None, backends=()):
        ((address, size, device, meta),) = reg_list
        assert (mem_type in ("DRAM", "VRAM"), device, meta, backends) == (True, 0, "", ["UCX"])
        for at in (0, size - 1):
            assert (
                ctypes.c_ubyte.from_address(address + at).value == (0 if at % 4096 else 0x5A)
                or mem_type == "VRAM"
            )
        if mem_type == "VRAM":
            assert set(ctypes.string_at(address, size)) == {0x5A}
        return object()

    def deregister_memory(self, dereg_list, backends=()):
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

    def get_xfer_descs(self, descs, mem_type=None):
        assert mem_type in ("DRAM", "VRAM")
        assert [len(piece) for piece in descs] == [3]
        return descs

    def initialize_xfer(
        self, operation, local_descs, remote_descs, remote_agent, notif_msg=b"", backends=()
    ):
        assert (operation, type(remote_agent), notif_msg) == ("READ", str, b"")
        assert [p[1] for p in local_descs] == [p[1] for p in remote_descs]
        return {"left": 0}

    def transfer(self, handle, notif_msg=b""):
        handle["left"] = 3
        return "PROC"

    def check_xfer_state(self, handle):
        handle["left"] -= 1
        if FAULT == "transfer":
            return "ERR"
        return "DONE" if handle["left"] <= 0 else "PROC"

    def release_xfer_handle(self, handle):
        pass
