#!/bin/bash
cat > /app/slugs.py << 'END'
def slug(title):
    """Return a title in lower case with one hyphen between its words, such as `a-small-step`."""
    return "-".join(title.lower().split())
END
