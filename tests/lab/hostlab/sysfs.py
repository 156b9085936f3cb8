"""Make /sys on a host show its own network devices, and RDMA devices where it has some.

A container's /sys shows the network devices of the machine, so every host gets a second sysfs, mounted
from inside its own network namespace at each boot. IO: files.
"""

from pathlib import Path

from hostlab.gpus import FakeNic

RDMA_SOURCE = "/usr/share/dynctl-lab/infiniband"
"""Where a host keeps its RDMA tree; the boot script mounts it at /sys/class/infiniband."""

# The kernel's /sys takes no new directory. So a small tmpfs takes the place of /sys/class, every real
# class is bound into it (links like ../../devices/… still resolve from there), and ours is one more.
_SCRIPT = f"""#!/bin/sh
set -e
aside=/run/dynctl-lab/sys
mkdir -p $aside
mount -t sysfs sysfs $aside
mount --make-private $aside
mount --make-private /sys
mount --bind $aside/devices /sys/devices
mount -t tmpfs -o size=64k,mode=755 tmpfs /sys/class
for path in $aside/class/*; do
  name=${{path##*/}}
  [ "$name" = infiniband ] && continue
  mkdir "/sys/class/$name"
  mount --bind "$path" "/sys/class/$name"
done
if [ -d {RDMA_SOURCE} ]; then
  mkdir /sys/class/infiniband
  mount --bind {RDMA_SOURCE} /sys/class/infiniband
fi
umount --lazy $aside
"""

_UNIT = """[Unit]
Description=This host's own devices in /sys
DefaultDependencies=no
After=local-fs.target
Before=sysinit.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/local/lib/dynctl-lab-sysfs
"""

_RATES = {100: "100 Gb/sec (4X EDR)", 200: "200 Gb/sec (4X HDR)", 400: "400 Gb/sec (4X NDR)"}
_STATES = {"ACTIVE": ("4: ACTIVE", "5: LinkUp"), "DOWN": ("1: DOWN", "3: Disabled")}


def install(root: Path, nics: tuple[FakeNic, ...] = ()) -> None:
    """Give the file system at `root` the boot step, and a tree for its RDMA devices."""
    for nic in nics:
        _write_nic(root / RDMA_SOURCE.lstrip("/") / nic.name, nic)
    _write(root / "usr/local/lib/dynctl-lab-sysfs", _SCRIPT, 0o755)
    unit = root / "etc/systemd/system/dynctl-lab-sysfs.service"
    _write(unit, _UNIT, 0o644)
    wants = root / "etc/systemd/system/sysinit.target.wants"
    wants.mkdir(parents=True, exist_ok=True)
    (wants / unit.name).symlink_to(f"/etc/systemd/system/{unit.name}")


def _write_nic(directory: Path, nic: FakeNic) -> None:
    state, phys_state = _STATES[nic.state]
    guid = f"0c42:a103:00{nic.index:02x}:{int(nic.bus_id[5:7], 16):04x}"
    files = {
        "hca_type": "MT4129",
        "fw_ver": "28.39.3004",
        "node_type": "1: CA",
        "node_guid": guid,
        "sys_image_guid": guid,
        "ports/1/state": state,
        "ports/1/phys_state": phys_state,
        "ports/1/rate": _RATES[nic.rate_gb_s],
        "ports/1/link_layer": nic.link_layer,
        "ports/1/lid": f"0x{nic.index + 1:x}" if nic.link_layer == "InfiniBand" else "0x0",
        "ports/1/gids/0": f"fe80:0000:0000:0000:{guid}",
        "ports/1/gid_attrs/types/0": "IB/RoCE v1",
        "ports/1/counters/link_downed": "0",
        "device/numa_node": str(nic.numa),
        "device/vendor": "0x15b3",
        "device/device": "0x1021",
        "device/uevent": f"DRIVER=mlx5_core\nPCI_SLOT_NAME={nic.bus_id}",
    }
    if nic.netdev:
        files[f"device/net/{nic.netdev}/operstate"] = "up" if nic.state == "ACTIVE" else "down"
        files[f"device/net/{nic.netdev}/mtu"] = "4092"
        files["ports/1/gid_attrs/ndevs/0"] = nic.netdev
    for name, text in files.items():
        _write(directory / name, text + "\n", 0o444)


def _write(path: Path, text: str, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
