"""Makes the cases' package importable: `--import-mode=importlib` adds nothing to sys.path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
