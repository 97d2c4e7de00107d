"""The trainer's process: the only room that imports verl and Ray."""
