"""Mistakes of other charts (docs/immune.md): webhooks, generated data, releases that outgrow their Secret."""

from __future__ import annotations

import base64
import gzip
import subprocess
from pathlib import Path

import pytest
import yaml

from opd_cluster import parts

CHART = Path(__file__).resolve().parents[3] / "charts" / "opd-operator"
#: The API server's limit for a Secret.
SECRET_BYTES = 1024 * 1024


@pytest.fixture(scope="module")
def render() -> str:
    return template()


def template() -> str:
    command = [str(parts.binary(parts.HELM)), "template", "opd-operator", str(CHART), "--namespace", "opd-system"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_there_is_no_webhook_and_no_certificate(render: str) -> None:
    kinds = {document["kind"] for document in yaml.safe_load_all(render) if document}
    assert "Deployment" in kinds
    assert not {
        kind for kind in kinds if "Webhook" in kind or kind in ("Certificate", "Issuer", "APIService", "Secret")
    }


def test_two_renders_are_equal_so_that_an_upgrade_replaces_nothing_generated(render: str) -> None:
    assert template() == render


def test_a_release_fits_many_times_into_its_secret(render: str) -> None:
    """Helm keeps chart and manifest, gzipped and in base64 twice (its own and the Secret's)."""
    files = b"".join(path.read_bytes() for path in sorted(CHART.rglob("*")) if path.is_file())
    stored = base64.b64encode(base64.b64encode(gzip.compress(files + render.encode())))
    assert len(stored) < SECRET_BYTES / 4
