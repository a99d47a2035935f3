"""Planted defects and the proof that gates catch them. ``catalogue`` lists them, ``planted`` makes gates of them."""
