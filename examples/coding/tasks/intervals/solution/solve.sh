#!/bin/bash
cat > /app/intervals.py << 'END'
def merged(intervals):
    """Return intervals (start, end) in order, those that touch or overlap as one."""
    result = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result
END
