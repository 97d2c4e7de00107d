#!/bin/bash
cat > /app/calc.py << 'END'
def add(a, b):
    """Return the sum."""
    return a + b
END
