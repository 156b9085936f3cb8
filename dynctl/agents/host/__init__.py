"""What one machine offers a supervisor: processes, ports, GPUs, log files; none of them knows what a unit is."""
