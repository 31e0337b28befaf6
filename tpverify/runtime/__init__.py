"""Ranks, the coordinator that drives them, and the runtimes users open on top."""
