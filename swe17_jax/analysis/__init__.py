"""Floor 4: what a run did, for people; nothing imports it.

Reads records and metrics and returns plain data or a page. Imports `core`,
`tasks`, `weights` and `rollout`; never JAX. Open `report.py` first.
"""
