"""Floor 1: how new weights get from the trainer to the engines, as deltas.

The codec, the chain of versions, and the two ends of it. Knows no engine and
no model: named numpy arrays go in, named numpy arrays come out.
Imports `core`; never JAX. Open `manifest.py` first.
"""
