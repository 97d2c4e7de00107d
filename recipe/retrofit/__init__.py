"""The checks of ``empo2 init``: record an episode, predict its training rows, report findings."""
