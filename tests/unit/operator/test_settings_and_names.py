"""Settings from the environment; names and labels within Kubernetes' limits; how templates merge."""

from __future__ import annotations

import itertools

import pytest

from opd_api.v1alpha1 import PullPolicy, TeacherBackend
from opd_api.vocabulary import Role
from opd_operator.children import names
from opd_operator.children.merge import merge_template
from opd_operator.settings import Settings, SettingsError

LONG = "a" * 40


def test_settings_are_read_with_their_types() -> None:
    settings = Settings.from_environment(
        {
            "OPD_OPERATOR_TRAINER_IMAGE": "t:1",
            "OPD_OPERATOR_WATCH_NAMESPACES": "a, b,",
            "OPD_OPERATOR_LEADER_ELECTION": "false",
            "OPD_OPERATOR_WORKERS": "3",
            "OPD_OPERATOR_CAPACITY_BACKOFF_MIN_SECONDS": "5",
            "OPD_OPERATOR_IMAGE_PULL_POLICY": "Never",
            "PATH": "/bin",
        }
    )
    assert settings.trainer_image == "t:1"
    assert settings.watch_namespaces == ("a", "b")
    assert settings.leader_election is False
    assert settings.workers == 3
    assert settings.capacity_backoff_min_seconds == 5.0
    assert settings.image_pull_policy is PullPolicy.NEVER
    assert settings.image_of(TeacherBackend.TRANSFORMERS) == "t:1"
    assert settings.image_of(TeacherBackend.VLLM) == settings.vllm_image


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("OPD_OPERATOR_WORKERS", "many", "WORKERS"),
        ("OPD_OPERATOR_WORKERS", "0", "greater than 0"),
        ("OPD_OPERATOR_LEADER_ELECTION", "perhaps", "true or false"),
        ("OPD_OPERATOR_TRAINER_IMGE", "x", "is no setting"),
        ("OPD_OPERATOR_CAPACITY_BACKOFF_MIN_SECONDS", "9999", "must not exceed"),
        ("OPD_OPERATOR_RETRY_BACKOFF_SECONDS", "9999", "must not exceed"),
        ("OPD_OPERATOR_LEASE_RENEW_SECONDS", "20", "retry < renew < duration"),
        ("OPD_OPERATOR_IMAGE_PULL_POLICY", "Sometimes", "PullPolicy"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(variable: str, value: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        Settings.from_environment({variable: value})


def test_names_stay_within_their_limits() -> None:
    teacher = "t" * 16
    limits = {
        names.ray_job(LONG, 1_000_000): 47,
        names.teacher(LONG, teacher): 46,
        names.check_job(LONG): 63,
        names.probe_job(LONG, ["x"]): 63,
        names.config_map(LONG, "0123456789"): 63,
        names.progress_config_map(LONG): 63,
        names.keys_secret(LONG, "01234567"): 63,
        names.head_account(LONG): 63,
        names.network_policy(LONG): 63,
    }
    for name, limit in limits.items():
        assert len(name) <= limit, name
        assert name[-1].isalnum()
    for value in names.labels(LONG, Role.TEACHER, attempt=7, teacher=teacher).values():
        assert len(value) <= 63


def test_different_things_get_different_names() -> None:
    long_names = [names.teacher(LONG[:-1] + last, teacher) for last in "xy" for teacher in ("a" * 16, "a" * 15 + "b")]
    assert len(set(long_names)) == 4
    assert len({names.ray_job(LONG, number) for number in range(1, 50)}) == 49


def test_names_are_the_same_every_time_and_for_every_order() -> None:
    assert {names.probe_job("math", order) for order in itertools.permutations(["a", "b", "c"])} == {
        names.probe_job("math", ["c", "b", "a"])
    }
    assert names.probe_job("math", ["a"]) != names.probe_job("math", ["b"])


def test_a_template_merges_maps_by_key_and_named_lists_by_identity() -> None:
    base = {
        "metadata": {"labels": {"a": "1"}},
        "spec": {
            "tolerations": [{"key": "gpu"}],
            "containers": [
                {
                    "name": "main",
                    "args": ["--a"],
                    "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                }
            ],
            "volumes": [{"name": "data", "emptyDir": {}}],
        },
    }
    overlay = {
        "metadata": {"labels": {"b": "2"}},
        "spec": {
            "tolerations": [{"key": "other"}],
            "containers": [
                {
                    "name": "main",
                    "args": ["--b"],
                    "env": [{"name": "B", "valueFrom": {"fieldRef": {}}}, {"name": "C", "value": "3"}],
                    "volumeMounts": [{"name": "more", "mountPath": "/more"}],
                },
                {"name": "sidecar", "image": "s"},
            ],
            "volumes": [{"name": "data", "hostPath": {"path": "/d"}}, {"name": "more", "emptyDir": {}}],
        },
    }
    merged = merge_template(base, overlay)
    main, sidecar = merged["spec"]["containers"]
    assert merged["metadata"]["labels"] == {"a": "1", "b": "2"}
    assert merged["spec"]["tolerations"] == [{"key": "other"}]
    assert main["args"] == ["--b"]
    assert main["env"] == [
        {"name": "A", "value": "1"},
        {"name": "B", "valueFrom": {"fieldRef": {}}},
        {"name": "C", "value": "3"},
    ]
    assert [item["mountPath"] for item in main["volumeMounts"]] == ["/data", "/more"]
    assert sidecar == {"name": "sidecar", "image": "s"}
    assert merged["spec"]["volumes"] == [{"name": "data", "hostPath": {"path": "/d"}}, {"name": "more", "emptyDir": {}}]
    assert base["spec"]["tolerations"] == [{"key": "gpu"}], "nothing is changed in place"
    assert merge_template(base, None) == base
