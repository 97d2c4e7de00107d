"""Start, watch and stop a run; make its folder, and load its model and tasks."""
