"""Pure manifest builders: from an OPDJob to the objects it needs."""

from opd_operator.children.context import JobContext
from opd_operator.children.render import render

__all__ = ["JobContext", "render"]
