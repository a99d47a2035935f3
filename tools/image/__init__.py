"""Container images: a base made of Debian packages, a wheelhouse, and the image of the stack. Standard library only."""
