"""Kinds that the operator touches, and where the API server serves them."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from opd_operator.model import API_VERSION_OF_KIND, Kind

OPDJOB_API_VERSION = "opd.dev/v1alpha1"
OPDJOB_KIND = "OPDJob"


@dataclass(frozen=True)
class Resource:
    """One kind at the API."""

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        """`v1` or `group/version`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """URL path; without a namespace the collection of all namespaces."""
        parts = ["/apis", self.group, self.version] if self.group else ["/api", self.version]
        if namespace:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part]
        return "/".join(parts)


_PLURALS = {
    ("opd.dev/v1alpha1", "OPDJob"): "opdjobs",
    ("apps/v1", "Deployment"): "deployments",
    ("batch/v1", "Job"): "jobs",
    ("coordination.k8s.io/v1", "Lease"): "leases",
    ("networking.k8s.io/v1", "NetworkPolicy"): "networkpolicies",
    ("ray.io/v1", "RayCluster"): "rayclusters",
    ("ray.io/v1", "RayJob"): "rayjobs",
    ("rbac.authorization.k8s.io/v1", "Role"): "roles",
    ("rbac.authorization.k8s.io/v1", "RoleBinding"): "rolebindings",
    ("v1", "ConfigMap"): "configmaps",
    ("v1", "Event"): "events",
    ("v1", "PersistentVolumeClaim"): "persistentvolumeclaims",
    ("v1", "Pod"): "pods",
    ("v1", "Secret"): "secrets",
    ("v1", "Service"): "services",
    ("v1", "ServiceAccount"): "serviceaccounts",
}


def _resource(api_version: str, kind: str) -> Resource:
    group, _, version = api_version.rpartition("/")
    return Resource(group, version, _PLURALS[api_version, kind], kind)


RESOURCES = MappingProxyType({key: _resource(*key) for key in _PLURALS})
OPDJOB = RESOURCES[OPDJOB_API_VERSION, OPDJOB_KIND]
LEASE = RESOURCES["coordination.k8s.io/v1", "Lease"]
CORE_EVENT = RESOURCES["v1", "Event"]
CLAIM = RESOURCES["v1", "PersistentVolumeClaim"]

#: What the cache holds of a job, by kind of the model.
CHILDREN = MappingProxyType({kind: RESOURCES[API_VERSION_OF_KIND[kind], kind.value] for kind in Kind})
#: What is watched: the OPDJobs themselves and their labelled children.
WATCHED = (OPDJOB, *CHILDREN.values())


def resource_of(api_version: str, kind: str) -> Resource:
    """The resource of a manifest. Raises KeyError for a kind that the operator has no business with."""
    return RESOURCES[api_version, kind]
