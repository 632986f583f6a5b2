"""An owner of an MPS daemon that waits to be ended.

python mps_job.py FOLDER    writes FOLDER/folder, the daemon's folder, when it serves
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from zpp_lab.train.launch.mps import Mps


def main(folder: Path) -> None:
    with Mps() as mps:
        (folder / "folder.tmp").write_text(str(mps.folder))
        (folder / "folder.tmp").rename(folder / "folder")
        time.sleep(600)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
