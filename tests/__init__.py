"""Makes `python -m tests.soak` find this folder: some packages install a `tests` of their own."""
