"""From what is to what should be."""
