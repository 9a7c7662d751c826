"""Differential privacy: norms without per-sample gradients, noise, accounting, labels that do not leak."""
