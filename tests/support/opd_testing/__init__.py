"""Helpers that several test tiers share. Nothing here is shipped."""
