"""Colossal Cave (Crowther and Woods, 1977), as the package `adventure` has it: an evaluation of exploring."""
