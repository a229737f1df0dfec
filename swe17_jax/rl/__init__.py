"""Floor 2: from groups of trajectories to a loss; arrays in, arrays out.

What may be trained on, how it is packed, advantages, replayed
log-probabilities, the loss. Is handed log-probabilities, never a model.
Imports `parallel` and `core`. Open `loss.py` first.
"""
