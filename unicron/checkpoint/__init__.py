"""Persistent checkpoints: folders on disk, written beside training."""
