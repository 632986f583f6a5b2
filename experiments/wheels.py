"""Which wheels of a folder to put into SITE: `wheels.py FOLDER SITE` prints a path a line.

Left out are wheels of another platform or Python, and packages that are installed already, by
themselves or in SITE with that version. Ends with 1 when nothing is left. Names on stderr what is
neither here nor fits.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

try:
    from packaging.tags import sys_tags
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename
except ImportError:
    from pip._vendor.packaging.tags import sys_tags  # type: ignore[assignment]
    from pip._vendor.packaging.utils import (  # type: ignore[assignment]
        InvalidWheelFilename,
        parse_wheel_filename,
    )


def main() -> int:
    folder, site = Path(sys.argv[1]), Path(sys.argv[2])
    fitting, lacking = wanted(folder, site)
    for name in lacking:
        print(
            f"{folder}: {name} is not installed, and no wheel of it is for this machine",
            file=sys.stderr,
        )
    for path in fitting:
        print(path)
    return 0 if fitting else 1


def wanted(folder: Path, site: Path) -> tuple[list[Path], list[str]]:
    """(wheels to install, packages that cannot be had), both sorted by name."""
    tags = frozenset(sys_tags())
    fitting: dict[str, Path] = {}
    others: set[str] = set()
    for wheel in sorted(folder.glob("*.whl")):
        try:
            name, version, _, own = parse_wheel_filename(wheel.name)
        except InvalidWheelFilename:
            others.add(wheel.name)
            continue
        if installed(name, str(version), site):
            continue
        if own & tags:
            fitting[name] = wheel
        else:
            others.add(name)
    return list(fitting.values()), sorted(others - set(fitting))


def installed(name: str, version: str, site: Path) -> bool:
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return False
    ours = Path(str(found.locate_file(""))).resolve() == site.resolve()
    return found.version == version if ours else True


if __name__ == "__main__":
    sys.exit(main())
