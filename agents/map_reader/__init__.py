"""Find a coin and bring it back: TextWorld-Express's MapReader without its map, with short turns."""
