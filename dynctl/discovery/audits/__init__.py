"""Questions for a closer look, one file each: they know the plan, and cost more than probes."""
