"""Tasks for the agent: where they come from and what judges them.

Imports `core` only; no JAX. Open `micro_repair` first: it makes the tasks of
the quickstart. `sandbox` runs untrusted code, `verifier` compares what it
returned, `dataset` stores task sets under a fingerprint.
"""
