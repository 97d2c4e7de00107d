#!/bin/bash
cat > /app/words.py << 'END'
def counts(text):
    """Return how often each word occurs, whatever its case and the signs around it."""
    found = {}
    for word in text.lower().split():
        word = word.strip(".,;:!?")
        found[word] = found.get(word, 0) + 1
    return found
END
