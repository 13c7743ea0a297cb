"""The loop: two pumps (rollout, train) over one buffer, in one asyncio process without an accelerator."""

from opd_trainer.controller.run import Controller, Parts

__all__ = ["Controller", "Parts"]
