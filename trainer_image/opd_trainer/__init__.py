"""The trainer: rollout, teacher scoring and learning of one OPDJob."""
