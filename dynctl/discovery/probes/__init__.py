"""One probe per file, each exporting PROBE. A new file here is a new fact about every host."""
