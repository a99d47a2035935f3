"""``python -m tools.image base|wheelhouse|image``. Exit codes: 0 done, 1 a step failed, 4 something the caller has to mend."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from tools.image import base, build, wheelhouse
from tools.image.cli import ImageError, require_daemon
from tools.setup_env import SetupError


def make_base() -> None:
    require_daemon()
    base.ensure()


def make_wheelhouse() -> None:
    wheelhouse.ensure()


def make_image() -> None:
    require_daemon()
    build.ensure()


STEPS: dict[str, Callable[[], None]] = {"base": make_base, "wheelhouse": make_wheelhouse, "image": make_image}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) != 1 or arguments[0] not in STEPS:
        sys.stderr.write(f"usage: python -m tools.image {'|'.join(STEPS)}\n")
        return 4
    try:
        STEPS[arguments[0]]()
    except (ImageError, SetupError) as exc:
        sys.stderr.write(f"image: {exc}\n")
        return exc.code
    except KeyboardInterrupt:
        sys.stderr.write("image: interrupted; run it again to go on\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
