"""Find the coin in a house of eleven rooms: TextWorld-Express's CoinCollector with short turns, for small models."""
