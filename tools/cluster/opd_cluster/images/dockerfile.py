"""Builds our Dockerfiles without a container daemon: each COPY and RUN becomes a layer keyed by what it depends on.

Understands what those files use (ARG, FROM, ENV, LABEL, COPY, RUN, USER, WORKDIR, ENTRYPOINT, CMD) and refuses the rest.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from opd_cluster.errors import ClusterError
from opd_cluster.images.layers import Layer, chroot, digest, make_layer


@dataclass(frozen=True)
class Image:
    """A stack of layers (bottom first) and how to start a container from it."""

    name: str
    layers: tuple[Layer, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    user: str = ""
    workdir: str = "/"

    @property
    def bytes(self) -> int:
        return sum(layer.bytes for layer in self.layers)

    def config(self) -> dict[str, object]:
        """The OCI image configuration document."""
        return {
            "architecture": "amd64",
            "os": "linux",
            "config": {
                "Env": [f"{name}={value}" for name, value in self.env.items()],
                "Labels": dict(self.labels),
                "Entrypoint": list(self.entrypoint),
                "Cmd": list(self.command),
                "User": self.user,
                "WorkingDir": self.workdir,
            },
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in self.layers]},
            "history": [{"created_by": layer.summary} for layer in self.layers],
        }


@dataclass(frozen=True)
class _Build:
    image: Image
    context: Path
    arguments: Mapping[str, str]
    declared: Mapping[str, str]


def build(name: str, file: Path, context: Path, base: tuple[Layer, ...], arguments: Mapping[str, str]) -> Image:
    """The image that the Dockerfile describes, with `base` in the place of `ARG BASE_IMAGE`."""
    state = _Build(
        Image(name, base, env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}),
        context,
        arguments,
        {},
    )
    steps: dict[str, Callable[[_Build, str], _Build]] = {
        "ARG": _arg,
        "FROM": _from,
        "ENV": _env,
        "LABEL": _label,
        "COPY": _copy,
        "RUN": _run,
        "USER": lambda build, text: _with(build, user=_expand(build, text)),
        "WORKDIR": lambda build, text: _with(build, workdir=_expand(build, text)),
        "ENTRYPOINT": lambda build, text: _with(build, entrypoint=tuple(json.loads(text)), command=()),
        "CMD": lambda build, text: _with(build, command=tuple(json.loads(text))),
    }
    for word, rest in instructions(file.read_text()):
        if word not in steps:
            raise ClusterError(f"{file}: {word} is not understood", f"use one of {', '.join(steps)}")
        state = steps[word](state, rest)
    return state.image


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, rest) pairs: comment lines dropped, continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def _with(build: _Build, **changes: object) -> _Build:
    return replace(build, image=replace(build.image, **changes))  # type: ignore[arg-type]


def _expand(build: _Build, text: str) -> str:
    known = {**build.declared, **build.image.env}
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda match: known.get(match[1] or match[2], ""), text)


def _arg(build: _Build, text: str) -> _Build:
    name, _, default = text.partition("=")
    return replace(build, declared={**build.declared, name: build.arguments.get(name, _expand(build, default))})


def _from(build: _Build, text: str) -> _Build:
    if text != "${BASE_IMAGE}":
        raise ClusterError(f"FROM {text}: only FROM ${{BASE_IMAGE}} is understood")
    return build


def _pairs(build: _Build, text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(_expand(build, text)))


def _env(build: _Build, text: str) -> _Build:
    return _with(build, env={**build.image.env, **_pairs(build, text)})


def _label(build: _Build, text: str) -> _Build:
    return _with(build, labels={**build.image.labels, **_pairs(build, text)})


def _stacked(build: _Build, layer: Layer) -> _Build:
    return _with(build, layers=(*build.image.layers, layer))


def _copy(build: _Build, text: str) -> _Build:
    text = _expand(build, text)
    *patterns, destination = shlex.split(text)
    sources = [found for pattern in patterns for found in sorted(build.context.glob(pattern))]
    if not sources:
        raise ClusterError(f"COPY {text}: nothing matches in {build.context}")
    files = [file for source in sources for file in _files_of(source)]
    content = hashlib.sha256(b"".join(str(file).encode() + file.read_bytes() for file in files)).hexdigest()
    key = digest("COPY", text, content, build.image.layers[-1].key)

    def fill(target: Path) -> None:
        place = target / destination.lstrip("/")
        into = destination.endswith("/") or len(sources) > 1
        (place if into else place.parent).mkdir(parents=True, exist_ok=True)
        for source in sources:
            if source.is_dir():
                shutil.copytree(source, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, place)

    return _stacked(build, make_layer(key, f"COPY {text}", fill))


def _files_of(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    return sorted(file for file in source.rglob("*") if file.is_file() and "__pycache__" not in file.parts)


def _run(build: _Build, text: str) -> _Build:
    image = build.image
    env = {**build.declared, **image.env}
    key = digest("RUN", text, repr(sorted(env.items())), image.user, *(layer.key for layer in image.layers))

    def fill(target: Path) -> None:
        chroot(image.layers, target, text, env=env)

    return _stacked(build, make_layer(key, f"RUN {text[:60]}…", fill))
