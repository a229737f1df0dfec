"""Floor 0: what every process needs, in the standard library and numpy.

Records that cross process borders, configuration, object storage, metrics.
Imports nothing of ours and never JAX; only `storage` knows Google Cloud, only
`metrics` knows TensorBoard. Open `records.py` first.
"""
