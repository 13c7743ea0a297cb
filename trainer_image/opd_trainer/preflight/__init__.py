"""Checks before accelerators are taken: `opd-trainer check` (inputs) and `opd-trainer probe` (teachers)."""
