"""Evaluate runs: their metrics, tables and curves."""
