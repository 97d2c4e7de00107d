"""The look before the start: what a run would miss in its settings, on its machine and on its cluster."""
