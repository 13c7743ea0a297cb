"""What the API server asks of the parts of a pod that Kubernetes owns and the OPDJob passes through.

Not all of it: what people get wrong, so that they know before there is a cluster. On a cluster the operator asks the API server
itself (a dry run of the children).
"""

from opd_api.kubernetes.pods import env_problems, resource_problems, template_problems
from opd_api.kubernetes.scheduling import affinity_problems, spread_problems, toleration_problems
from opd_api.kubernetes.values import Problems, key_problem, label_problems, resource_name_problem, subdomain_problem

__all__ = [
    "Problems",
    "affinity_problems",
    "env_problems",
    "key_problem",
    "label_problems",
    "resource_name_problem",
    "resource_problems",
    "spread_problems",
    "subdomain_problem",
    "template_problems",
    "toleration_problems",
]
