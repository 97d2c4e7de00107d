def newest(versions):
    """Return the highest of version numbers such as `1.10.2`."""
    return max(versions)
