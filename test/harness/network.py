"""Hosts as network namespaces of this machine, joined by links of a given speed."""

import contextlib
import ctypes
import os
import re
import shutil
import subprocess

CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000
DEVICE = "eth0"
_libc = ctypes.CDLL(None, use_errno=True)


def missing():
    """Returns why this machine can have no such network; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if lacking := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"{' and '.join(lacking)} of iproute2 is not installed: apt-get install iproute2"
    try:
        with Network(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


class Network:
    """`hosts` namespaces, each with an address; the end of the context removes them.

    A switch in its own namespace joins them. `gigabits` is the speed of each link, in both
    directions; None if as fast as this machine copies. `queue`, such as "10kb", is the most that
    waits for a link; what exceeds it is dropped. `switch` is a command whose arguments are devices:
    it forwards packets between them, and prints a line once it does. If empty, the kernel forwards.
    """

    _made = 0

    def __init__(self, hosts, gigabits=None, queue=None, mtu=1500, switch=()):
        Network._made += 1
        self.prefix = f"tcpg-{os.getpid()}-{Network._made}"
        self.hosts = hosts
        self.gigabits = gigabits
        self.queue = (
            ("burst", "4kb", "limit", queue) if queue else ("burst", "128kb", "latency", "50ms")
        )
        self.mtu = str(mtu)
        self.switch = switch
        self._stack = contextlib.ExitStack()

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            self._make(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self._stack.close()

    def __getstate__(self):  # what a rank needs for `enter`
        return {name: value for name, value in vars(self).items() if name != "_stack"}

    def _make(self, stack):
        def namespace(name):
            self._run("ip", "netns", "add", name)
            stack.callback(self._run, "ip", "netns", "delete", name)
            self._run("ip", "-n", name, "link", "set", "lo", "up")

        switch = f"{self.prefix}-switch"
        namespace(switch)
        if not self.switch:
            self._run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
            self._run("ip", "-n", switch, "link", "set", "switch", "up")
        for host in range(self.hosts):
            name, port = self.name(host), f"port{host}"
            namespace(name)
            self._run(
                *("ip", "-n", switch, "link", "add", port, "type", "veth"),
                *("peer", "name", DEVICE, "netns", name),
            )
            joined = () if self.switch else ("master", "switch")
            self._run("ip", "-n", switch, "link", "set", port, *joined, "up")
            self._run("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", DEVICE)
            self._run("ip", "-n", name, "link", "set", DEVICE, "up")
            for where, device in ((name, DEVICE), (switch, port)):
                self._run("ip", "-n", where, "link", "set", device, "mtu", self.mtu)
                # A bundle of segments would exceed the queue, or be too long for the switch.
                if "limit" in self.queue or self.switch:
                    self._run("ip", "-n", where, "link", "set", device, "gso_max_segs", "1")
                if self.gigabits is not None:
                    self._run(
                        *("tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf"),
                        *("rate", f"{self.gigabits}gbit", *self.queue),
                    )
        if self.switch:
            ports = [f"port{host}" for host in range(self.hosts)]
            process = subprocess.Popen(
                ("ip", "netns", "exec", switch, *self.switch, *ports), stdout=subprocess.PIPE
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            if not process.stdout.readline():
                raise subprocess.CalledProcessError(process.wait(), process.args, stderr="")

    def name(self, host):
        return f"{self.prefix}-host{host}"

    def address(self, host):
        return f"10.77.0.{host + 1}"

    def enter(self, host):
        """Moves the calling thread, and processes that it starts, to a host; sets its hostname."""
        with open(f"/run/netns/{self.name(host)}") as file:
            if _libc.setns(file.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        if _libc.unshare(CLONE_NEWUTS) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        name = f"host{host}".encode()
        _libc.sethostname(name, len(name))
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE

    def offer(self, host, address):
        """Gives a host an address that other hosts cannot reach; returns the interface's name."""
        self._run(
            *("ip", "-n", self.name(host), "addr", "add", f"{address}/32"),
            *("dev", "lo", "label", "lo:apart"),
        )
        return "lo:apart"

    def route(self, host):
        """Routes a host's packets to unknown addresses through its device."""
        self._run("ip", "-n", self.name(host), "route", "add", "default", "dev", DEVICE)

    def sent(self, host):
        """Returns the number of bytes that a host has sent."""
        path = f"/sys/class/net/{DEVICE}/statistics/tx_bytes"
        return int(self._run("ip", "netns", "exec", self.name(host), "cat", path))

    def sent_again(self, host):
        """Returns the segments that a host's TCP has resent, as bytes if each has full size."""
        text = self._run("ip", "netns", "exec", self.name(host), "cat", "/proc/net/snmp")
        names, values = (line.split() for line in text.splitlines() if line.startswith("Tcp:"))
        return int(values[names.index("RetransSegs")]) * int(self.mtu)

    def dropped(self, host):
        """Returns the number of packets that a host's link has dropped."""
        text = self._run("tc", "-n", self.name(host), "-s", "qdisc", "show", "dev", DEVICE)
        return int(re.search(r"dropped (\d+)", text)[1])

    def cut(self, host):
        """Cuts a host off: its link loses everything from now on, and no host is told."""
        self._run("ip", "-n", f"{self.prefix}-switch", "link", "set", f"port{host}", "nomaster")

    def block(self, port):
        """Makes hosts drop each other's TCP packets except a port's, without telling the sender."""
        for host in range(self.hosts):
            rule = ("ip", "-n", self.name(host), "rule")
            incoming = ("iif", DEVICE, "ipproto", "tcp")
            # A namespace's first rule would deliver every packet for its own addresses.
            self._run(*rule, "add", "lookup", "local", "priority", "3")
            self._run(*rule, "delete", "priority", "0")
            for end in ("dport", "sport"):
                passing = (*incoming, end, str(port), "lookup", "local")
                self._run(*rule, "add", *passing, "priority", "1")
            self._run(*rule, "add", *incoming, "blackhole", "priority", "2")

    def listeners(self, host):
        """Returns how many sockets of a host wait for connections."""
        text = self._run("ip", "netns", "exec", self.name(host), "cat", "/proc/net/tcp")
        return sum(line.split()[3] == "0A" for line in text.splitlines()[1:])

    @staticmethod
    def _run(*command):
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
