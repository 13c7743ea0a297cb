"""Prompts in, scored samples out: data, engines, rewards, filters, buffer and the staleness gate."""
