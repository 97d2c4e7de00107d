def median(numbers):
    """Return the middle number; of an even count, the mean of the middle two."""
    ordered = sorted(numbers)
    return ordered[len(ordered) // 2]
