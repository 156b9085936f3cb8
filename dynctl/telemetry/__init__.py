"""What is happening: scraping, windows, snapshots."""
