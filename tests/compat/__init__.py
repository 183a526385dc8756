"""Tests of block-sparse attention."""
