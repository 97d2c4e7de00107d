"""Searches of a house with short turns, for small models: CoinCollector, and MapReader without its map."""
