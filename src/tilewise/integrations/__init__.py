"""Above compat: model libraries that call tilewise through the hooks that they offer.

Importing this package imports, registers and patches nothing. transformers has a ``register``. timm
has no place to register in, so it has an ``enable`` for a model.
"""
