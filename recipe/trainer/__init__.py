"""The trainer's process: the only package that imports verl and Ray."""
