"""Behind ``empo2 init``: record an episode, foresee its training rows, report findings."""
