"""Above compat: model libraries that call tilewise through the hooks that they offer.

Nothing is imported, registered or patched by an import of this room: transformers has a
``register``, and timm, which has no place to register in, an ``enable`` for a model.
"""
