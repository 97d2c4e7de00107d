def counts(text):
    """Return how often each word occurs, whatever its case and the signs around it."""
    found = {}
    for word in text.split():
        found[word] = found.get(word, 0) + 1
    return found
