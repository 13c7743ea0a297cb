"""From the URLs of a teacher to its replicas: a DNS name stands for all its addresses."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit


@dataclass(frozen=True, slots=True, order=True)
class Endpoint:
    """One address behind a URL."""

    #: Where requests go: the URL with the address in place of the name.
    url: str
    #: The name, for the TLS check.
    name: str
    #: Name and port, for the Host header.
    host: str
    tls: bool


async def resolve(url: str) -> list[Endpoint]:
    """Every address of the URL's host, sorted. Raises OSError when the name does not resolve.

    Of a dual-stack name only the IPv4 addresses count, otherwise each replica would be there twice.
    """
    parts = urlsplit(url)
    name, tls = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    host = parts.netloc.rpartition("@")[2]
    if _literal(name):
        return [Endpoint(_with_address(url, name, port), name, host, tls)]
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    by_family: dict[int, set[str]] = {}
    for family, _, _, _, address in found:
        by_family.setdefault(family, set()).add(str(address[0]))
    addresses = by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or set()
    return sorted(Endpoint(_with_address(url, address, port), name, host, tls) for address in addresses)


def _literal(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _with_address(url: str, address: str, port: int) -> str:
    parts = urlsplit(url)
    host = f"[{address}]" if ":" in address else address
    return urlunsplit((parts.scheme, f"{host}:{port}", parts.path.rstrip("/"), "", ""))
