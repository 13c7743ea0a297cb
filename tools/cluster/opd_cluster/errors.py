"""The one exception a user of opd-cluster sees: what went wrong and what to do instead."""

from __future__ import annotations


class ClusterError(Exception):
    """Something this machine cannot do, or a wait that ran out.

    `hint` names the remedy or the other way to the same goal; the command line prints both and exits with 1.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


ELSEWHERE = (
    "Use a cluster you already have (make demo CONTEXT=<kubeconfig context>), or run the job as local processes "
    "without Kubernetes (opd run examples/quickstart.yaml)."
)
