"""Verify attention: validation, dispatch and the CPU reference."""
