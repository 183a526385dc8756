"""Tests of the caches."""
