"""A program of its own: packets from one network device to another and back, each a fixed time after it came.

Linux delays packets itself with `tc ... netem`, which many kernels are built without; TUN devices, which hand a program
all that is sent to them, are nearly everywhere. Called by hosts.py with the delay in seconds and the descriptors of two
such devices; ends when its stdin does, and so with the rank that has started it.
"""

import os
import select
import sys
import time
from collections import deque

LARGEST_PACKET = 1 << 16


def pass_on(delay_s: float, devices: tuple[int, int]) -> None:
    """Pass packets on until stdin ends."""
    across = dict(zip(devices, reversed(devices), strict=True))
    under_way: deque[tuple[float, int, bytes]] = deque()  # due at, to, packet
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        ready, _, _ = select.select([0, *devices], [], [], wait_s)
        if 0 in ready:
            return
        for device in ready:
            under_way.append((time.monotonic() + delay_s, across[device], os.read(device, LARGEST_PACKET)))
        while under_way and under_way[0][0] <= time.monotonic():
            _, device, packet = under_way.popleft()
            os.write(device, packet)


if __name__ == "__main__":
    pass_on(float(sys.argv[1]), (int(sys.argv[2]), int(sys.argv[3])))
