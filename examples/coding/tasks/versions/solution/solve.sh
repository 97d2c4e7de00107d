#!/bin/bash
cat > /app/versions.py << 'END'
def newest(versions):
    """Return the highest of version numbers such as `1.10.2`."""
    return max(versions, key=lambda version: [int(part) for part in version.split(".")])
END
