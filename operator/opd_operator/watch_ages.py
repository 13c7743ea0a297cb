"""How long each watch has been silent. An idle cluster sends no events, but the API server sends bookmarks every minute, which
kopf keeps to itself: so bytes are counted where they arrive, in the HTTP session.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp


class WatchAges:
    """Seconds since each watch last delivered bytes."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}

    def expect(self, names: list[str]) -> None:
        """Starts the clock of these watches and forgets others."""
        now = time.monotonic()
        self._seen = dict.fromkeys(names, now)

    def seen(self, name: str) -> None:
        """Bytes arrived."""
        if name in self._seen:
            self._seen[name] = time.monotonic()

    def by_name(self) -> dict[str, float]:
        """Ages in seconds by plural, with `@namespace` where watched by namespace."""
        now = time.monotonic()
        return {name: now - seen for name, seen in self._seen.items()}

    @property
    def oldest(self) -> float:
        """The largest age, in seconds; 0 before the first watch."""
        return max(self.by_name().values(), default=0.0)


def watch_name(path: str) -> str | None:
    """Plural of a collection's path, with its namespace: `pods@team`. None for discovery."""
    parts = path.strip("/").split("/")
    inner = parts[2:] if parts[0] == "api" else parts[3:]
    if len(inner) == 3 and inner[0] == "namespaces":
        return f"{inner[2]}@{inner[1]}"
    return inner[0] if len(inner) == 1 else None


def version_of(listed: bytes) -> bytes:
    """A list (JSON) without its items and without the token for more of them: a watch can start where it ends."""
    body = json.loads(listed)
    version = (body.get("metadata") or {}).get("resourceVersion", "")
    return json.dumps({**body, "metadata": {"resourceVersion": version}, "items": []}).encode()


class Pulse:
    """A response's content that tells when bytes arrive; everything else is the content's own."""

    def __init__(self, content: aiohttp.StreamReader, beat: Callable[[], None]) -> None:
        self._content = content
        self._beat = beat

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """The content's chunks."""
        async for chunk in self._content.iter_chunked(size):
            self._beat()
            yield chunk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)
