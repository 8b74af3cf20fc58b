"""How averaging reaches other peers: the context of its parts, and its calls. Stands on agreement."""
