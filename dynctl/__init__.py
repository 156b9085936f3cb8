"""dynctl: disaggregated LLM serving on bare-metal hosts over SSH. Holds the version and nothing else."""

__version__ = "0.1.0"
