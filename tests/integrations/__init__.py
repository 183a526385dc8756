"""Tests of ``tilewise.integrations``: each skips where its library is absent."""
