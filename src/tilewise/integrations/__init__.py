"""Floor 9: model libraries that call tilewise through the hooks that they offer.

Nothing is imported, registered or patched by an import of this room: each module has a
``register`` of its own.
"""
