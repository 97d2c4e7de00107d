"""Start, watch and stop the processes of a run, of a sweep, or of a server."""
