"""The air-gapped bundle: everything a target host lacks, in parts, with digests, and one script that installs it there.

``python -m tools.bundle TARGET`` (``make bundle TARGET=...``) on a connected machine; ``sh install.sh PREFIX`` on the target.
"""
