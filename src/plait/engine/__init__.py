"""The engine: a step and its life."""
