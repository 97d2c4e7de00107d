#!/bin/bash
cat > /app/lists.py << 'END'
def chunks(items, size):
    """Return the items in lists of `size`; the last one may be shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]
END
