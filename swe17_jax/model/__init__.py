"""Floor 2: one mixture-of-experts decoder and its Hugging Face form.

Flax modules inside, pure functions outside: `init(config, key)` and
`apply(params, config, tokens, ...)`. The only importer of flax.
Imports `parallel` and `core`; `config` is free of JAX. Open `transformer.py`
first.
"""
