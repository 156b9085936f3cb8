"""The parts of the screen, one file each: `PANEL` with pure `rows(view, width, height)`. Pure."""
