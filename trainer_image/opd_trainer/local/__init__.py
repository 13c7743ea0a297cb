"""`opd run`: the same steps as in a cluster, as processes of one machine."""

from opd_trainer.local.supervisor import run_local

__all__ = ["run_local"]
