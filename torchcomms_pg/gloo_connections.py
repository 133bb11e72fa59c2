"""Makes the ``ProcessGroupGloo`` of torch through which the hosts of a group communicate."""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

# Torch's class, for its options and devices. A caller may have replaced dist.ProcessGroupGloo by a
# function that makes the connections.
GLOO: Any = getattr(_distributed_c10d, "ProcessGroupGloo", None)

# Addresses reserved for documentation (RFC 5737, RFC 3849): only the default route leads to them.
ELSEWHERE = ("203.0.113.1", "2001:db8::1")


def connect(
    store: dist.Store,
    addresses: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    across_hosts: bool,
) -> dist.Backend:
    """Connects the ranks that share `addresses`, and returns the connections. Collective.

    The ranks exchange their addresses through `addresses`, a place in the job's `store`.

    Gloo listens on the interfaces ``GLOO_SOCKET_IFNAME``, or else at the address to which the
    host's name resolves. On many machines that is a loopback address, which other hosts cannot
    reach. If the ranks are `across_hosts`, this rank then listens at the address from which this
    host reaches the store, or else the rest of the network.

    Raises:
        OSError: this rank has no address to listen at.
        RuntimeError: the ranks cannot be connected.
    """
    address = _reachable_address(store) if across_hosts else None
    options = GLOO._Options()
    try:
        options._devices = _devices(address)
    except RuntimeError as error:
        raise OSError(str(error)) from error
    options._timeout, options._threads = timeout, 2 * len(options._devices)
    make: Any = dist.ProcessGroupGloo
    made: dist.Backend = make(addresses, rank, size, options)
    return made


def _devices(address: str | None) -> list[Any]:
    """Returns the devices with which Gloo listens: at `address`, or as Gloo chooses if None."""
    if address is not None:
        return [GLOO.create_device(hostname=address)]
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        return [GLOO.create_device(interface=name) for name in names.split(",")]
    return [GLOO.create_default_device()]


def _reachable_address(store: dist.Store) -> str | None:
    """Returns the address to listen at, or None if Gloo may choose."""
    if os.environ.get("GLOO_SOCKET_IFNAME") or not _is_loopback(_address_of_name()):
        return None
    targets = [store.host] if isinstance(store, dist.TCPStore) else []
    for target in (*targets, *ELSEWHERE):
        found = _own_address_towards(target)
        if not _is_loopback(found):
            return found
    return None


def _address_of_name() -> str | None:
    """Returns the address that Gloo chooses: the first of this host's name that can be bound."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as probe:
                probe.bind(address)
        except OSError:
            continue
        return str(address[0])
    return None


def _own_address_towards(host: str) -> str | None:
    """Returns this host's address in packets to `host`, without sending a packet."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _is_loopback(address: str | None) -> bool:
    """Returns whether the address is loopback, or None, in whose place Gloo uses loopback."""
    return address is None or ipaddress.ip_address(address.partition("%")[0]).is_loopback
