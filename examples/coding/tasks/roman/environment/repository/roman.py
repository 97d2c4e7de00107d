VALUES = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}


def number(text):
    """Return the number of a Roman numeral, such as 14 for XIV."""
    return sum(VALUES[letter] for letter in text)
