"""The network that the hosts of a run share: this host's address and interface in it, and the gateway's socket."""

import errno
import ipaddress
import os
import resource
import socket
from urllib.parse import urlsplit

import psutil

from empo2.recipe.config import Settings
from empo2.recipe.errors import ConfigError

LOOPBACK = "127.0.0.1"
_NO_PROXY = ("NO_PROXY", "no_proxy")
_DESCRIPTORS = 65_536  # at most; some systems allow a billion, and libraries make tables of them


def address_in(network: str) -> tuple[str, str]:
    """Return the first address that this host has in a network, and its interface.

    Args:
        network: ``hardware.network``: an interface, or addresses such as 10.0.0.0/16; one address is a network, too.

    Raises:
        ConfigError: this host has none.
    """
    here = [
        (address.address, name)
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET
    ]
    for address, name in here:
        if network[:1].isdigit():
            found = ipaddress.ip_address(address) in ipaddress.ip_network(network, strict=False)
        else:
            found = network == name
        if found:
            return address, name
    has = ", ".join(f"{name} {address}" for address, name in here)
    raise ConfigError(f"hardware.network={network!r}: {socket.gethostname()} has no address in it; it has {has}")


def gateway_host(settings: Settings) -> str:
    """Return the address that the gateway listens on.

    Raises:
        ConfigError: as `address_in`.
    """
    network = settings.hardware.network
    return settings.gateway.host or (LOOPBACK if network is None else address_in(network)[0])


def direct(*urls: str) -> dict[str, str]:
    """Return the variables by which no HTTP client asks a proxy for this machine or for the hosts of ``urls``.

    Those of this process stay in them. Hosts, since httpx (0.28) reads no ranges of addresses in them.
    """
    given = ",".join(os.environ.get(name, "") for name in _NO_PROXY).split(",")
    hosts = [urlsplit(url).hostname or "" for url in urls]
    kept = dict.fromkeys(filter(None, [*(each.strip() for each in given), LOOPBACK, "localhost", *hosts]))
    return dict.fromkeys(_NO_PROXY, "*" if "*" in kept else ",".join(kept))  # in a list, urllib takes "*" for a host


def raise_descriptor_limit() -> int:
    """Let this process have as many open files and connections as it may; return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(soft, min(hard, _DESCRIPTORS))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket for the gateway to inherit, so that no other process can take the port.

    A ConfigError if it is taken, or the host is not this machine's.
    """
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        why = str(error.strerror).partition(" (while ")[0]  # `create_server` names the address again
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise ConfigError(f"gateway.port={port} on {host}: {why}; 0 takes a free one") from None
        raise ConfigError(f"gateway.host={host!r}: {why}; give an address of this machine") from None
