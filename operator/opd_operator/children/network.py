"""NetworkPolicy of a job, ingress only: its pods among themselves, KubeRay to the dashboard, scrapers to the metrics."""

from __future__ import annotations

from opd_api.vocabulary import Label, Port, Role
from opd_operator.children import names
from opd_operator.children.context import JobContext
from opd_operator.model import Manifest


def network_policy(job: JobContext) -> Manifest:
    """The policy. Egress is left open: hub downloads, storage and external teachers are the user's own affair."""
    own = {"matchLabels": {Label.JOB.value: names.job_label(job.name)}}
    scrape: Manifest = {"ports": [_port(Port.METRICS), _port(Port.TEACHER)]}
    if job.spec.network_policy.metrics_from:
        scrape["from"] = job.spec.network_policy.metrics_from
    kuberay = {Label.NAME.value: job.settings.kuberay_operator_name}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": job.metadata(names.network_policy(job.name), Role.CONFIG),
        "spec": {
            "podSelector": own,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": own}]},
                {
                    "from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": kuberay}}],
                    "ports": [_port(Port.RAY_DASHBOARD)],
                },
                scrape,
            ],
        },
    }


def _port(number: int) -> Manifest:
    return {"protocol": "TCP", "port": number}
