"""flashinfer writes into a folder when it is imported: not into the user's."""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(Path(tempfile.gettempdir()) / "kvcore-tests-flashinfer"))
