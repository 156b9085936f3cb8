"""What is there: probes, their parsers and the topology they make."""
