"""The cases that are tested, checked, compiled, tuned and measured.

``case`` is the type of a case, ``variants`` has masks and scores by name, ``table`` the rows and
who selects them, and ``inputs`` makes the tensors of a case.
"""
