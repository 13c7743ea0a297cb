"""What the Ray head may do at the API: read and patch one ConfigMap. No other pod of a job has a token."""

from __future__ import annotations

from opd_api.vocabulary import Role
from opd_operator.children import names
from opd_operator.children.context import JobContext
from opd_operator.model import Manifest

RBAC = "rbac.authorization.k8s.io"


def head_access(job: JobContext) -> list[Manifest]:
    """ServiceAccount, Role and RoleBinding of the head."""
    name = names.head_account(job.name)
    account: Manifest = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": job.metadata(name, Role.HEAD),
        "automountServiceAccountToken": False,
    }
    role: Manifest = {
        "apiVersion": f"{RBAC}/v1",
        "kind": "Role",
        "metadata": job.metadata(name, Role.HEAD),
        "rules": [
            {
                "apiGroups": [""],
                "resources": ["configmaps"],
                "resourceNames": [names.progress_config_map(job.name)],
                "verbs": ["get", "patch"],
            }
        ],
    }
    binding: Manifest = {
        "apiVersion": f"{RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": job.metadata(name, Role.HEAD),
        "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": job.namespace}],
    }
    return [account, role, binding]
