"""The OPDJob operator: read, observe, plan, apply; one key at a time."""
