"""Keeps large-model training in JAX stable."""
