"""Names, addresses, manifests and configuration of a cluster, without starting one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from opd_cluster import addons, cluster, controlplane, daemons, debian, full, layout, network, node, parts
from opd_cluster.cli import app
from opd_cluster.cluster import Shape
from opd_cluster.errors import ClusterError
from opd_cluster.images.dockerfile import Image
from opd_cluster.layout import Layout, open_layout
from opd_cluster.shell import wait_for


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPD_CACHE", str(tmp_path))
    monkeypatch.setattr(layout, "output", lambda command: "")
    return tmp_path


def test_clusters_get_address_ranges_of_their_own_and_keep_them(cache: Path) -> None:
    first, second = open_layout("one"), open_layout("two")
    assert (first.api_address, second.api_address) == ("10.203.0.2", "10.203.1.2")
    assert open_layout("one") == first
    assert layout.existing() == ["one", "two"]


def test_an_address_that_another_cache_uses_is_not_given_out(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "output", lambda command: "7: opd0    inet 10.203.0.1/24 scope global opd0")
    assert open_layout("one").index == 1


@pytest.mark.parametrize("name", ["", "Upper", "a b", "x" * 33, "-a", "../up"])
def test_a_name_that_cannot_name_an_interface_is_refused(cache: Path, name: str) -> None:
    with pytest.raises(ClusterError, match="no cluster name"):
        open_layout(name)


def test_without_root_up_says_what_to_use_instead(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    for arguments in (["up"], ["up", "--control-plane"], ["down"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 1
        assert "needs root" in result.stderr
        assert "CONTEXT=" in result.stderr
        assert "opd run" in result.stderr


def test_a_missing_package_without_apt_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="no-such-package"):
        debian.ensure((debian.Tool("no-such-program", "no-such-package"),))


def test_a_wait_that_runs_out_says_what_for_and_why() -> None:
    with pytest.raises(ClusterError, match="the moon: not within 0 s") as caught:
        wait_for("the moon", lambda: False, seconds=0, hint=lambda: "clouds")
    assert caught.value.hint == "clouds"


def test_a_part_is_rebuilt_when_its_sources_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "tools" / "cluster" / "go" / "pause"
    module.mkdir(parents=True)
    (module / "main.go").write_text("package main")
    monkeypatch.setattr(parts, "SOURCE", tmp_path)
    before = parts.key(parts.PAUSE)
    assert parts.key(parts.PAUSE) == before
    (module / "go.sum").write_text("changed")
    assert parts.key(parts.PAUSE) != before


def test_every_part_pins_its_modules() -> None:
    for part in parts.ALL:
        assert (parts.module(part) / "go.mod").exists()
        assert part is parts.PAUSE or (parts.module(part) / "go.sum").exists()


def test_the_api_server_checks_owner_references(cache: Path) -> None:
    arguments = controlplane._api_server(open_layout("one"))
    assert any("OwnerReferencesPermissionEnforcement" in word for word in arguments)


def test_nodes_have_pools_taints_and_ranges_of_their_own(cache: Path) -> None:
    members = full.nodes(open_layout("one"), Shape(gpu_nodes=2, gpus=8))
    assert [(member.name, member.pool, member.gpus) for member in members] == [
        ("cpu-0", "cpu", 0),
        ("gpu-0", "gpu", 8),
        ("gpu-1", "gpu", 8),
    ]
    configs = [node._kubelet_config(member) for member in members]
    assert [config["registerWithTaints"] for config in configs] == [[], [node.GPU_TAINT], [node.GPU_TAINT]]
    assert len({config["podCIDR"] for config in configs}) == 3
    assert len({config["cgroupRoot"] for config in configs}) == 3
    assert network.pod_cidr(2) == "10.244.2.0/24"


def test_gpu_nodes_of_named_pools_have_the_label_and_the_taint_of_theirs_in_turn(cache: Path) -> None:
    shape = Shape(gpu_nodes=3, gpus=4, pools=("big", "small"))
    cpu, *gpus = full.nodes(open_layout("one"), shape)
    assert [member.labels.get(node.POOL_LABEL) for member in gpus] == ["big", "small", "big"]
    assert node.POOL_LABEL not in cpu.labels
    own = {"key": node.POOL_LABEL, "value": "big", "effect": "NoSchedule"}
    assert gpus[0].taints == [node.GPU_TAINT, own]
    cluster.record_shape(open_layout("one"), shape)
    assert cluster.recorded_shape(open_layout("one")) == shape


def test_a_daemon_that_does_not_run_cannot_be_killed(cache: Path) -> None:
    with pytest.raises(ClusterError, match="kubelet-gpu-0 of cluster one does not run"):
        node.kill_kubelet(full.nodes(open_layout("one"), Shape())[1])


def test_a_daemon_that_ends_while_the_cluster_comes_up_is_named_at_once(cache: Path) -> None:
    here = open_layout("one")
    here.logs.mkdir(parents=True)
    (here.logs / "kubelet-gpu-0.log").write_text("bind: address already in use")
    pids = here.state / "pids"
    pids.mkdir()
    (pids / "kubelet-cpu-0").write_text(str(os.getpid()))
    (pids / "kubelet-gpu-0").write_text(str(2**22 + 1))  # beyond the kernel's largest
    with pytest.raises(ClusterError, match="every node is ready: kubelet-gpu-0 ended") as caught:
        daemons.await_condition(here, "every node is ready", lambda: False, seconds=600)
    assert "address already in use" in caught.value.hint


def test_images_go_where_their_pods_run(cache: Path) -> None:
    members = full.nodes(open_layout("one"), Shape(gpu_nodes=2, gpus=8))
    placed = {name: [member.name for member in full._where(name, members)] for name in full.catalog.BUILDERS}
    assert placed == {
        "opd-operator": ["cpu-0"],
        "opd-trainer": ["cpu-0", "gpu-0", "gpu-1"],
        "opd-trainer-sglang": ["gpu-0", "gpu-1"],
    }


def test_the_claim_is_bound_to_one_directory_for_one_namespace(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[Any] = []
    monkeypatch.setattr(addons, "apply", lambda _layout, *manifests: applied.extend(manifests))
    monkeypatch.setattr(addons, "find_kubectl", lambda: "kubectl")
    ran: list[list[Any]] = []

    def fake_run(command: list[Any], **_: Any) -> Any:
        ran.append(command)
        return type("Done", (), {"stdout": "Released"})()

    monkeypatch.setattr(addons, "run", fake_run)
    here = open_layout("one")
    addons.create_claim(here, "team")
    volume, claim = applied
    assert volume["spec"]["hostPath"]["path"] == str(here.data)
    assert volume["spec"]["claimRef"]["namespace"] == claim["metadata"]["namespace"] == "team"
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert any("delete" in command for command in ran), "a volume left by an earlier namespace is replaced"


def test_a_running_cluster_of_another_shape_is_not_replaced(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = open_layout("one")
    monkeypatch.setattr(cluster, "is_up", lambda _: True)
    cluster.record_shape(here, Shape(gpu_nodes=1))
    assert cluster.running_as(here, Shape(gpu_nodes=1))
    with pytest.raises(ClusterError, match="runs already"):
        cluster.running_as(here, Shape(gpu_nodes=2))


def test_mount_points_are_listed_innermost_first(tmp_path: Path) -> None:
    assert cluster.mounts_below(tmp_path) == []
    found = cluster.mounts_below(Path("/"))
    assert found[-1] == "/"
    assert found == sorted(found, key=len, reverse=True)


def test_the_chart_gets_its_values_and_waits(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    image = Image("opd-operator:0.1.0", ())
    monkeypatch.setattr(addons.catalog, "operator", lambda: image)
    monkeypatch.setattr(addons, "helm", lambda _layout, *arguments: calls.append(arguments) or "installed")
    assert addons.install_operator(open_layout("one"), "replicas=2") == "installed"
    assert calls[0][:3] == ("upgrade", "--install", "opd-operator")
    assert calls[0][-2:] == ("--set", "replicas=2")
    assert "--wait" in calls[0]
    (annotation,) = [word for word in calls[0] if str(word).startswith("podAnnotations")]
    image = Image("opd-operator:0.1.0", (), user="other")
    addons.install_operator(open_layout("one"))
    assert annotation not in calls[1], "another image of the same version must restart the operator"


def test_a_kubeconfig_holds_everything_it_needs(cache: Path) -> None:
    from opd_cluster import pki

    here: Layout = open_layout("one")
    here.pki.mkdir(parents=True)
    for name in ("ca.crt", "admin.crt", "admin.key"):
        (here.pki / name).write_text(name)
    path = pki.write_kubeconfig(here, here.kubeconfig, "admin")
    assert path.stat().st_mode & 0o777 == 0o600
    document = json.loads(path.read_text())
    assert document["clusters"][0]["cluster"]["server"] == "https://10.203.0.2:6443"
    assert document["users"][0]["user"]["client-key-data"] == "YWRtaW4ua2V5"


def test_a_build_that_is_given_up_leaves_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = tmp_path / "go"
    go.write_text(
        f"#!/bin/sh\n[ $1 = list ] && exit 0\necho $$ > {tmp_path}/pid\n"
        "echo one >&2\necho two >&2\nexec sleep 60 </dev/null >/dev/null 2>&1\n"
    )
    go.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(parts, "PROGRESS_SECONDS", 0.0)

    def give_up(text: str) -> None:
        if "compiled" in text:
            raise KeyboardInterrupt

    monkeypatch.setattr(parts, "say", give_up)
    with pytest.raises(KeyboardInterrupt):
        parts._compile(parts.PAUSE, tmp_path / "out", dict(os.environ))
    compiler = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{compiler}").exists()


def test_a_word_that_nothing_can_be_built_from_is_named_with_what_there_is(cache: Path) -> None:
    result = CliRunner().invoke(app, ["build", "pause", "nonsense"])
    assert result.exit_code == 1
    assert "nothing here is called nonsense" in result.stderr
    assert "helm" in result.stderr
    assert "trainer-sglang" in result.stderr
    assert not (cache / "parts").exists()
