"""Floor 3: agents at work: prompts, tool calls, groups, records.

Imports `tasks`, `weights`, `core` and `engine/interface`; never JAX, and
never `train`, which it meets through records in a store. Open `worker.py`
first.
"""
