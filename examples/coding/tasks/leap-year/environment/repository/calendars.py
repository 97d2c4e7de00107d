def is_leap(year):
    """Return True if the year has 366 days in the Gregorian calendar."""
    return year % 4 == 0
