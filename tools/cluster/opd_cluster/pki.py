"""Certificates and kubeconfigs: one authority per cluster, made anew by every `up`."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

from opd_cluster.layout import API_SERVICE_ADDRESS, Layout
from opd_cluster.shell import run

CURVE = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc"]
DAYS = ["-days", "365"]


def create_authority(layout: Layout) -> None:
    """The authority, the API server's serving certificate and the pair that signs service account tokens."""
    shutil.rmtree(layout.pki, ignore_errors=True)
    layout.pki.mkdir(parents=True, mode=0o700)
    ca = layout.pki / "ca"
    extensions = ["-addext", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature"]
    run(["openssl", "req", "-x509", *CURVE, *DAYS, *extensions, "-subj", "/CN=opd-cluster", *_files(ca)])
    names = [
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
        "localhost",
    ]
    addresses = ["127.0.0.1", API_SERVICE_ADDRESS, layout.api_address]
    alternative = ",".join([f"DNS:{name}" for name in names] + [f"IP:{address}" for address in addresses])
    issue(layout, "apiserver", "kube-apiserver", alternative=alternative)
    run(["openssl", "genpkey", "-algorithm", "RSA", "-out", layout.pki / "sa.key"])
    run(["openssl", "pkey", "-in", layout.pki / "sa.key", "-pubout", "-out", layout.pki / "sa.pub"])


def _files(stem: Path) -> list[str]:
    return ["-keyout", f"{stem}.key", "-out", f"{stem}.crt"]


def issue(layout: Layout, stem: str, user: str, *, group: str = "", alternative: str = "") -> None:
    """A certificate for `user` (and `group`), good for serving under `alternative` and for logging in."""
    subject = (f"/O={group}" if group else "") + f"/CN={user}"
    extensions = ["-addext", "extendedKeyUsage=serverAuth,clientAuth"]
    if alternative:
        extensions += ["-addext", f"subjectAltName={alternative}"]
    authority = ["-CA", str(layout.pki / "ca.crt"), "-CAkey", str(layout.pki / "ca.key")]
    run(
        [
            "openssl",
            "req",
            "-x509",
            *CURVE,
            *DAYS,
            *authority,
            *extensions,
            "-subj",
            subject,
            *_files(layout.pki / stem),
        ]
    )


def write_kubeconfig(layout: Layout, path: Path, stem: str) -> Path:
    """A self-contained kubeconfig (certificates embedded) that logs in with the certificate `stem`."""

    def embedded(file: str) -> str:
        return base64.b64encode((layout.pki / file).read_bytes()).decode()

    context = f"opd-{layout.name}"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": context,
        "clusters": [
            {"name": context, "cluster": {"server": layout.server, "certificate-authority-data": embedded("ca.crt")}}
        ],
        "users": [
            {
                "name": context,
                "user": {
                    "client-certificate-data": embedded(f"{stem}.crt"),
                    "client-key-data": embedded(f"{stem}.key"),
                },
            }
        ],
        "contexts": [{"name": context, "context": {"cluster": context, "user": context}}],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1))
    path.chmod(0o600)
    return path
