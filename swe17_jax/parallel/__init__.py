"""Floor 1: where arrays live, on how many chips, and under which names.

The only place that knows mesh axes; everyone else uses logical axis names.
Imports `core` and JAX; no I/O. Open `mesh.py` first.
"""
