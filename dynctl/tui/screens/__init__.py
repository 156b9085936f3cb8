"""Arrangements of panels. Pure."""
