"""Tests of `swe17_jax.tasks`."""
