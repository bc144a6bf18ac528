"""Two hosts on one machine: ranks in two networks of their own, and between these a link as thin and slow as asked.

Called by all ranks of a launch. Inside a host ranks talk over its loopback, as fast as the machine copies; between the
hosts over a pair of virtual network devices, each of which sends no more bytes per second than a token bucket of the
Linux kernel gives it (`tc ... tbf`). With a latency both are TUN devices, and a process of rank 0 hands each packet
over that much later (delay_line.py).

Nothing has a name outside the ranks: a network lives as long as a process in it, and with it go its devices and their
queues. So nothing is left behind, however the ranks end, and the network of the machine itself is never touched.
"""

import ctypes
import os
import shutil
import struct
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import torch.distributed as dist

from course_lib.comm import all_gather_json
from course_lib.simulate import delay_line
from course_lib.validate import Size, checked, number

PROGRAMS = ("ip", "tc", "unshare")
DEVICE = "wire0"  # the name of each host's end of the link
ADDRESSES = ("10.0.0.1", "10.0.0.2")  # nobody else is in these networks
BURST_BYTES = 64 << 10  # passes at once after a pause: one packet of TCP as Linux hands it on
QUEUE_S = 1.0  # a packet that would wait longer is dropped, and TCP sends it again
LIMIT = timedelta(seconds=60)
CLONE_NEWNET = 0x40000000  # linux/sched.h
TUN, TUNSETIFF, IFF_TUN, IFF_NO_PI = "/dev/net/tun", 0x400454CA, 0x1, 0x1000  # linux/if_tun.h
TUN_MTU = 9000  # jumbo frames, as data centres use them: fewer packets for the process between
TRIAL = (  # for a network that ends with the trial
    f"ip link add {DEVICE} type veth peer name far0 && "
    f"tc qdisc add dev {DEVICE} root tbf rate 1mbit burst {BURST_BYTES} latency 1s"
)

_lines: list[subprocess.Popen] = []  # kept, or else their stdin would be closed

LinkRate = Annotated[float, lambda name, value: number(name, value, least=1e4, most=1e9)]
Latency = Annotated[float, lambda name, value: number(name, value, least=0, most=1)]


def why_no_hosts() -> str | None:
    """Return why this machine cannot emulate two hosts, in one sentence; None if it can. Tries it, and leaves nothing.

    It needs Linux, root, the programs of iproute2, virtual network devices and the queue "tbf" in the kernel.
    """
    if sys.platform != "linux":
        return f"two hosts are emulated by network namespaces, which Linux has; this is {sys.platform}"
    if os.geteuid() != 0:
        return f"two hosts need root, who may make network devices; this is user {os.geteuid()}"
    if missing := [name for name in PROGRAMS if find(name) is None]:
        return f"two hosts need the programs {', '.join(PROGRAMS)}; {', '.join(missing)} cannot be found"
    try:
        run("unshare", "--net", "sh", "-c", TRIAL)
    except OSError as error:
        return str(error)
    return None


@checked
def split_into_hosts(bytes_per_s: LinkRate, ranks_per_host: Size = 2, latency_s: Latency = 0.0) -> int:
    """Move this rank to its host, and join the world there anew; return the host, 0 or 1.

    Every rank of a launch calls it, before it makes groups: the groups of before are gone.

    bytes_per_s    of the link between the hosts, in each direction, headers of packets included
    latency_s      of a packet on this link; 0: none is added
    Raises   ValueError unless the world has two hosts of that many ranks, or where hosts cannot be emulated
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size != 2 * ranks_per_host:
        raise ValueError(
            f"ranks_per_host is {ranks_per_host}, and the world has {world_size} ranks; two hosts need twice as many"
        )
    if sys.platform != "linux" or os.geteuid() != 0:
        raise ValueError(why_no_hosts())
    host, is_first = rank // ranks_per_host, rank % ranks_per_host == 0
    if is_first:
        _call("unshare", CLONE_NEWNET)
    store = os.memfd_create("store") if rank == 0 else None  # a file without a name: it ends with rank 0
    told = all_gather_json({"pid": os.getpid(), "store": store}, dist.group.WORLD)
    if rank == 0:
        peer = told[ranks_per_host]["pid"]
        if latency_s:
            devices = [_make_tun(os.getpid()), _make_tun(peer)]
        else:
            run("ip", "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", str(peer))
    dist.barrier()
    if is_first:
        _set_up(host, bytes_per_s)
    dist.barrier()
    if rank == 0 and latency_s:
        _start_delay_line(latency_s, devices)
    if not is_first:
        _enter_network(told[host * ranks_per_host]["pid"])
    dist.destroy_process_group()
    os.environ |= {"GLOO_SOCKET_IFNAME": DEVICE, "LOCAL_RANK": str(rank % ranks_per_host)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks_per_host)}
    store = dist.FileStore(f"/proc/{told[0]['pid']}/fd/{told[0]['store']}", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=LIMIT)
    return host


def link_bytes() -> int:
    """Return the bytes that this rank's host has sent over the link so far, as its device counts them."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == DEVICE:
            return int(counts.split()[8])
    raise ValueError("this rank is on no emulated host; call split_into_hosts first, on every rank")


def _set_up(host: int, bytes_per_s: float) -> None:
    """This host's end of the link: its address, and no more bytes per second than asked."""
    run("ip", "link", "set", "lo", "up")
    run("ip", "address", "add", f"{ADDRESSES[host]}/24", "dev", DEVICE)
    run("ip", "link", "set", DEVICE, "up")
    limit = ("rate", f"{round(8 * bytes_per_s)}bit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_S:g}s")
    run("tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", *limit)


def _enter_network(pid: int) -> None:
    """Go to the network of that process."""
    with open(f"/proc/{pid}/ns/net") as network:
        _call("setns", network.fileno(), CLONE_NEWNET)


def _make_tun(pid: int) -> int:
    """Make a TUN device in the network of that process; return what reads and writes its packets."""
    import fcntl  # not on Windows, where this module is read too

    back = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _enter_network(pid)  # where it is opened, there it makes its device
        device = os.open(TUN, os.O_RDWR)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
        run("ip", "link", "set", DEVICE, "mtu", str(TUN_MTU))
    except FileNotFoundError as error:
        raise OSError(f"a latency needs {TUN}, which is not here; use latency_s=0") from error
    finally:
        _call("setns", back, CLONE_NEWNET)
        os.close(back)
    return device


def _start_delay_line(latency_s: float, devices: list[int]) -> None:
    """Start the process that passes packets on; it ends when this rank does, which has the other end of its stdin."""
    command = [sys.executable, "-IS", delay_line.__file__, str(latency_s), *map(str, devices)]
    _lines.append(subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=devices))
    for device in devices:
        os.close(device)


def find(name: str) -> str | None:
    """A program's path; these are in /usr/sbin, which is not on everybody's PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def run(name: str, *arguments: str) -> None:
    """Run one of these programs. Raises OSError with what it said if it fails."""
    command = [find(name) or name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT.total_seconds())
    if done.returncode:
        said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[0]
        raise OSError(f"{Path(name).name} cannot make an emulated host: {said}")


def _call(name: str, *arguments: int) -> None:
    """A system call of this thread; threads that it starts from here on inherit what it changes."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        raise OSError(f"{name} cannot make an emulated host: {os.strerror(ctypes.get_errno())}")
