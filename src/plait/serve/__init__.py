"""Exported models over HTTP, by the Open Inference Protocol."""
