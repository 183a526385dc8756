"""The differential fuzzer: random calls against float64 (``./run fuzz``, see CONTRIBUTING.md)."""
