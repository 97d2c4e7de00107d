#!/bin/bash
cat > /app/stats.py << 'END'
def median(numbers):
    """Return the middle number; of an even count, the mean of the middle two."""
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[-middle - 1]) / 2
END
