"""The Lightning callbacks."""
