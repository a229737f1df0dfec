"""Floor 2: how a gradient becomes an update.

Muon for matrices, AdamW for the rest, their schedule, as optax
transformations. Imports `parallel`, `core` and optax. Open `optimizer.py`
first.
"""
