"""Reading what runs have left: metrics, tables, curves."""
