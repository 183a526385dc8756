"""The suites of the bench: sweeps over lengths, methods beside each other, a record and a page."""
