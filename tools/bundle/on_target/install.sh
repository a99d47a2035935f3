#!/bin/sh
# Install this bundle: sh install.sh PREFIX [more options: sh install.sh --help]. Touches nothing outside PREFIX.
# Can be stopped and run again; says which parts are missing while they are still on their way. PYTHON= names the host's
# interpreter, the one that has torch (default: python3).
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
PYTHON=${PYTHON:-python3}
command -v "$PYTHON" >/dev/null || { echo "install: no $PYTHON here; set PYTHON=/path/to/python" >&2; exit 4; }
exec "$PYTHON" -B "$here/install.py" "$@"
