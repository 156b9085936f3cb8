"""The parts of the screen, one file each, with a pure `rows(view, width, height)`: at most `height` lines. Pure."""
