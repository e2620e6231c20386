"""Rich comes with the view, not with the package."""

import subprocess
import sys


def test_planning_and_simulating_do_not_import_rich():
    code = "import sys, seqloom, seqloom.simulate; print('rich' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
