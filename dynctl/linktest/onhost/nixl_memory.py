"""Memory that NIXL can move: pages of this process, or of a GPU by way of the CUDA driver.

Runs on the host in the engine's Python, standard library only: torch would take seconds and half a gigabyte.
IO: memory, CUDA driver.
"""

import ctypes
import mmap
from typing import Any, NamedTuple

from dynctl.linktest.onhost.wire import LinkError


class Region(NamedTuple):
    """A piece of memory in NIXL's terms."""

    kind: str
    """`DRAM` or `VRAM`."""
    address: int
    size_bytes: int
    device: int
    owner: object
    """Keeps the memory alive."""

    def piece(self, at: int, num_bytes: int) -> list[tuple[int, int, int]]:
        """A transfer descriptor for a part of it."""
        return [(self.address + at, num_bytes, self.device)]


def dram(size_bytes: int) -> Region:
    """Pages of this process, each written once so that it is really there."""
    pages = mmap.mmap(-1, size_bytes)
    for at in range(0, size_bytes, mmap.PAGESIZE):
        pages[at] = 0x5A
    return Region("DRAM", ctypes.addressof(ctypes.c_char.from_buffer(pages)), size_bytes, 0, pages)


def vram(size_bytes: int) -> Region:
    """Memory of the first GPU that CUDA shows; its context stays current in this thread.

    Raises:
        LinkError: when the driver refuses; with its own words.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise LinkError(f"no CUDA driver: {error}") from error
    device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    _check(driver, "cuInit", 0)
    _check(driver, "cuDeviceGet", ctypes.byref(device), 0)
    _check(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _check(driver, "cuCtxSetCurrent", context)
    _check(driver, "cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
    _check(driver, "cuMemsetD8_v2", address, ctypes.c_ubyte(0x5A), ctypes.c_size_t(size_bytes))
    _check(driver, "cuCtxSynchronize")
    return Region("VRAM", address.value, size_bytes, 0, driver)


def _check(driver: ctypes.CDLL, name: str, *arguments: Any) -> None:  # noqa: ANN401 - C functions take anything
    status = getattr(driver, name)(*arguments)
    if status == 0:
        return
    text = ctypes.c_char_p()
    driver.cuGetErrorString(status, ctypes.byref(text))
    words = text.value.decode(errors="replace") if text.value else f"error {status}"
    raise LinkError(f"{name}: {words}")
