"""Starting, watching and stopping a run; its folder, model and tasks."""
