"""The OPDJob API: what a user may write, what the parts say to each other, and the words they use.

One source of truth: everything else (CRD, chart copy, documentation page, trainer configuration) is generated from here.
"""

GROUP = "opd.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "OPDJob"
PLURAL = "opdjobs"
