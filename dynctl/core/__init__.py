"""The nouns every stage shares: frozen values, standard library only. Pure."""
