"""Floor 3: what samples tokens and takes new weights between two of them.

One interface, several engines. Imports `weights` and `core`; `jax_engine`
alone imports `model` and `parallel`. Open `interface.py` first.
"""
