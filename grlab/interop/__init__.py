"""Weights of public checkpoints."""
