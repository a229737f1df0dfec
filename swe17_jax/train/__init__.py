"""Floor 3: the trainer: one jitted step, the loop around it, its state.

Imports `model`, `rl`, `optim`, `parallel`, `weights` and `core`; never
`rollout`, which it meets through records in a store. Open `loop.py` first.
"""
