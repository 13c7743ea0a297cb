"""Our Dockerfiles are understood completely, and an image changes exactly when what it is made from changes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from opd_cluster.errors import ClusterError
from opd_cluster.images import catalog, dockerfile, layers, rootfs
from opd_cluster.images.dockerfile import Image, build, instructions
from opd_cluster.images.layers import Layer, make_layer
from opd_cluster.images.store import _chained, digest_of, documents
from opd_cluster.layout import SOURCE


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What RUN would have executed; nothing is executed."""
    ran: list[str] = []
    monkeypatch.setattr(dockerfile, "chroot", lambda below, target, script, env: ran.append(script))
    return ran


@pytest.fixture
def base(cache: Path) -> tuple[Layer, ...]:
    return (make_layer("base", "base", lambda target: (target / "file").write_text("x")),)


def written(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "Dockerfile").write_text(text)
    return folder / "Dockerfile"


def test_comments_and_continued_lines_are_joined() -> None:
    text = "# why\nARG A=1\nRUN one && \\\n    # inside\n    two\n\nuser 1000\n"
    assert instructions(text) == [("ARG", "A=1"), ("RUN", "one &&  two"), ("USER", "1000")]


def test_settings_become_the_image_configuration(base: tuple[Layer, ...], tmp_path: Path, commands: list[str]) -> None:
    file = written(
        tmp_path / "context",
        'ARG BASE_IMAGE=any\nFROM ${BASE_IMAGE}\nARG LOCK=small\nENV A=1 B="two words"\nLABEL lock="${LOCK}"\n'
        'RUN echo hello\nUSER 1000:1000\nWORKDIR /home/opd\nENTRYPOINT ["tini", "--"]\nCMD ["opd"]\n',
    )
    image = build("name:1", file, file.parent, base, {"LOCK": "big"})
    assert (image.env["A"], image.env["B"], image.labels) == ("1", "two words", {"lock": "big"})
    assert (image.user, image.workdir, image.entrypoint, image.command) == (
        "1000:1000",
        "/home/opd",
        ("tini", "--"),
        ("opd",),
    )
    assert commands == ["echo hello"]
    config = image.config()["config"]
    assert isinstance(config, dict)
    assert config["User"] == "1000:1000"


def test_layers_are_reused_until_a_copied_file_changes(
    base: tuple[Layer, ...], tmp_path: Path, commands: list[str]
) -> None:
    file = written(tmp_path / "context", "FROM ${BASE_IMAGE}\nRUN first\nCOPY data/*.txt /opt/\nRUN second\n")
    (file.parent / "data").mkdir()
    (file.parent / "data" / "a.txt").write_text("one")
    before = build("name:1", file, file.parent, base, {})
    assert build("name:1", file, file.parent, base, {}) == before
    assert commands == ["first", "second"]
    assert (before.layers[2].path / "opt" / "a.txt").read_text() == "one"
    (file.parent / "data" / "a.txt").write_text("two")
    after = build("name:1", file, file.parent, base, {})
    assert commands == ["first", "second", "second"]
    assert after.layers[:2] == before.layers[:2]
    assert (after.layers[2].path / "opt" / "a.txt").read_text() == "two"


def test_a_layer_whose_making_failed_is_made_again(cache: Path) -> None:
    def fail(target: Path) -> None:
        (target / "half").write_text("")
        raise ClusterError("no")

    with pytest.raises(ClusterError):
        make_layer("key", "breaks", fail)
    layer = make_layer("key", "works", lambda target: (target / "whole").write_text("12345"))
    assert [file.name for file in layer.path.iterdir()] == ["whole"]
    assert layer.bytes == 5


@pytest.mark.parametrize("line", ["ADD a b", "FROM other", "VOLUME /x", "COPY nothing.* /"])
def test_what_is_not_understood_is_refused(base: tuple[Layer, ...], tmp_path: Path, line: str) -> None:
    file = written(tmp_path / "context", line + "\n")
    with pytest.raises(ClusterError, match=line.split()[0]):
        build("name:1", file, file.parent, base, {})


@pytest.mark.parametrize("path", ["operator/Dockerfile", "trainer_image/Dockerfile"])
def test_our_dockerfiles_build_non_root_images_with_labels(
    base: tuple[Layer, ...], commands: list[str], path: str, tmp_path: Path
) -> None:
    context = tmp_path / "context"
    (context / "dist").mkdir(parents=True)
    (context / "dist" / "opd-0.1.0-py3-none-any.whl").write_text("")
    (context / "locks").symlink_to(SOURCE / "locks")
    image = build("name:1", SOURCE / path, context, base, {"VERSION": "0.1.0"})
    assert image.user == "1000:1000"
    assert image.entrypoint[0] == "tini"
    assert image.labels["org.opencontainers.image.version"] == "0.1.0"
    assert image.env["PATH"].startswith("/opt/venv/bin:")
    assert any("--require-hashes" in command for command in commands)


def trainer_commands(base: tuple[Layer, ...], commands: list[str], root: Path, lock: str) -> list[str]:
    """The RUN lines of the trainer's Dockerfile."""
    context = root / lock
    (context / "dist").mkdir(parents=True)
    (context / "dist" / "opd-0.1.0-py3-none-any.whl").write_text("")
    (context / "locks").symlink_to(SOURCE / "locks")
    before = len(commands)
    build("name:1", SOURCE / "trainer_image/Dockerfile", context, base, {"LOCK": lock})
    return commands[before:]


def executed(script: str, folder: Path, programs: dict[str, int], **env: str) -> list[str]:
    """What a RUN line calls where nothing but these programs exists, by their exit codes."""
    folder.mkdir()
    log = folder / "log"
    log.touch()
    for name, code in programs.items():
        (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\nexit {code}\n')
        (folder / name).chmod(0o755)
    done = subprocess.run(["/bin/sh", "-e", "-c", script], env={"PATH": str(folder), **env}, check=False)
    assert done.returncode == 0, script
    return log.read_text().splitlines()


def test_only_the_image_with_sglang_gets_a_compiler_and_no_layer_of_packages_changes_with_it(
    base: tuple[Layer, ...], commands: list[str], tmp_path: Path
) -> None:
    for lock, added in (("trainer-image", 0), ("trainer-sglang-image", 3)):
        ran = trainer_commands(base, commands, tmp_path, lock)
        (compiler,) = [command for command in ran if "g++" in command]
        programs = {"apt-get": 0, "rm": 0}
        called = executed(compiler, tmp_path / f"{lock}-bin", programs, LOCK=lock)
        assert len(called) == added, called
        assert executed(compiler, tmp_path / f"{lock}-has", {**programs, "g++": 0}, LOCK=lock) == []
        (packages,) = [command for command in ran if "requirements.txt" in command]
        assert ran.index(packages) < ran.index(compiler) < len(ran) - 1, "between the packages and our wheel"
    assert {"gcc", "g++", "libc6-dev"} <= set(called[1].split())


def test_the_compiler_lies_below_the_dockerfile_whose_lines_have_no_network(
    base: tuple[Layer, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts: dict[str, bool] = {}
    monkeypatch.setattr(rootfs, "base", lambda: base[0])
    monkeypatch.setattr(rootfs, "dependencies", lambda lock, below, installed="": Layer(lock, lock))
    monkeypatch.setattr(rootfs, "chroot", lambda below, target, script, env, network: scripts.update({script: network}))
    monkeypatch.setattr(catalog, "_from_dockerfile", lambda name, file, below, lock: Image(name, below))
    with_sglang = catalog.trainer_sglang().layers
    assert [layer.key for layer in with_sglang[:3]] == [base[0].key, "trainer-image", "trainer-sglang-image"]
    assert with_sglang[3].summary == "gcc g++ libc6-dev"
    assert [
        (f"install -qy --no-install-recommends {with_sglang[3].summary} " in text, network)
        for text, network in scripts.items()
    ] == [(True, True)]
    assert catalog.trainer().layers == with_sglang[:2]
    assert f"--no-install-recommends {with_sglang[3].summary} " in (SOURCE / "trainer_image/Dockerfile").read_text()


@pytest.mark.parametrize("owned", [True, False])
def test_a_base_may_have_a_user_with_our_ids(
    base: tuple[Layer, ...], commands: list[str], tmp_path: Path, owned: bool
) -> None:
    (user,) = [line for line in trainer_commands(base, commands, tmp_path, "trainer-image") if "useradd" in line]
    # groupadd and useradd end with an error where the id is taken.
    taken = {"getent": 0, "groupadd": 4, "useradd": 4} if owned else {"getent": 2, "groupadd": 0, "useradd": 0}
    called = executed(user, tmp_path / "bin", {**taken, "mkdir": 0, "chown": 0})
    assert [line.split()[0] for line in called if "add" in line] == ([] if owned else ["groupadd", "useradd"])
    assert called[-2:] == ["mkdir -p /home/opd", "chown 1000:1000 /home/opd"]


def test_the_manifest_names_every_layer_and_the_chain_starts_anew_for_none(base: tuple[Layer, ...]) -> None:
    image = dockerfile.Image("name:1", (*base, Layer("other", "")))
    manifest, config = documents(image)
    assert digest_of(config).encode() in manifest
    (first, no_parent), (second, parent) = _chained(image.layers)
    assert (first, no_parent, second.key) == (base[0], "", "other")
    assert parent == base[0].diff_id


def test_only_layers_that_no_newest_build_uses_are_removed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, shared, new = (make_layer(key, key, lambda target: None) for key in ("old", "shared", "new"))
    layers.record("image:1", (shared, old))
    layers.record("other:1", (shared,))
    monkeypatch.setattr(layers, "GRACE_SECONDS", -1.0)
    layers.record("image:2", (shared, new))
    assert [layer.path.exists() for layer in (old, shared, new)] == [False, True, True]


def test_image_locks_agree_with_the_environments_that_the_tests_run_in() -> None:
    def versions(lock: str) -> dict[str, str]:
        return {name: text.split(" ")[0].split(";")[0] for name, text in rootfs._requirements(lock).items()}

    for image, environment in (
        ("operator-image", "operator"),
        ("trainer-image", "trainer"),
        ("trainer-sglang-image", "trainer"),
    ):
        wanted, tested = versions(image), versions(environment)
        assert len(wanted) > 20
        assert {name: version for name, version in wanted.items() if tested.get(name) != version} == {}
    assert "sglang" not in versions("trainer-image")
    assert "pytest" not in versions("trainer-sglang-image")


def test_every_locked_package_carries_its_hashes() -> None:
    for lock in ("operator-image", "trainer-image", "trainer-sglang-image"):
        assert all("--hash=sha256:" in text for text in rootfs._requirements(lock).values())
