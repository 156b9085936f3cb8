"""Routing policies: one file each, exporting POLICY."""
